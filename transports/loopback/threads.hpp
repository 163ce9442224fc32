// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Loopback between threads of one process: regions are copied straight from source view to
/// destination view. Whichever rank is free takes the next piece of work.

#include <memory>

#include "core/api/transport.hpp"

namespace m2n::loopback {

/// Collective.
std::unique_ptr<Session> prepare_in_threads(Group& group, const Program& program,
                                            const Buffers& buffers, Deadline deadline);

}  // namespace m2n::loopback
