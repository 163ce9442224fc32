// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A schedule on one rank's device, round after round.

#include <memory>

#include "core/api/transport.hpp"
#include "transports/nccl_common/plain_communicator.hpp"
#include "transports/nccl_reference/options.hpp"

namespace m2n::nccl_reference {

/// What the sessions of one transport share.
struct Connection {
  Group* group = nullptr;
  ReferenceOptions options;
  int device = 0;
  std::shared_ptr<nccl::CallThread> thread;
  std::unique_ptr<nccl::PlainCommunicator> comm;
};

/// Makes a session. Collective.
std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline);

}  // namespace m2n::nccl_reference
