// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Where this process runs.

#include "core/rendezvous/world_group.hpp"

namespace m2n {

/// Asks the system anew, so that a forked child gets its own answer.
Peer this_peer();

}  // namespace m2n
