// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A program's parameters as calls of NVIDIA's reshard library, round after round.

#include <memory>

#include "core/api/transport.hpp"
#include "transports/nccl_m2n/runtime.hpp"

namespace m2n::nccl_m2n {

/// Makes a session. Collective.
std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline);

}  // namespace m2n::nccl_m2n
