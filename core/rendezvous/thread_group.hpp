// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A world whose ranks are threads of one process.

#include <memory>
#include <vector>

#include "core/api/group.hpp"

namespace m2n {

/// One group object a rank, for ranks [0, @p size). Each may be moved to its own thread. A rank
/// whose object is destroyed has left: waits of the others fail and name it.
std::vector<std::unique_ptr<Group>> make_thread_groups(Rank size);

}  // namespace m2n
