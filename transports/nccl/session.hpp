// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A compiled program on one rank's device, and its rounds.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/api/transport.hpp"
#include "transports/nccl/communicator.hpp"
#include "transports/nccl/kernels.hpp"
#include "transports/nccl/options.hpp"
#include "transports/nccl/streams.hpp"
#include "transports/nccl/window.hpp"

namespace m2n::nccl {

/// What the sessions of one transport share.
struct Connection {
  Group* group = nullptr;
  NcclOptions options;
  int device = 0;
  std::vector<Identity> ranks;
  IpcMappings mappings;
  std::unique_ptr<Communicator> comm;  ///< Made by the first prepare() that needs it.
  StreamPool streams;
  /// For looking at flags, and for giving up: nothing waits on it.
  std::unique_ptr<Stream> side;  ///< Made by the first prepare().
};

/// What a session costs beside its bytes.
struct SessionFigures {
  double host_seconds = 0;  ///< Queueing the last round: of the calling thread, waits left out.
  std::uint64_t device_bytes = 0;  ///< Allocated by the session, in all ...
  std::uint64_t table_bytes = 0;   ///< ... and of these, descriptors.
  std::uint64_t engine_copies = 0;
  std::uint64_t list_tasks = 0;
};
SessionFigures figures_of(const Session& session);

/// Makes a session. Collective.
std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline);

}  // namespace m2n::nccl
