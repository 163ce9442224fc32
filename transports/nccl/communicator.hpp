// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One NCCL communicator over all ranks of a group: made under a deadline, watched, and aborted
/// without ever blocking the caller for long.

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <span>

#include "core/api/group.hpp"
#include "transports/nccl/wire.hpp"

namespace m2n::nccl {

/// - Collective: the constructor and windows.
/// - Threads: one at a time; abort() from any.
/// - Errors: TransportError{timed_out, peer_lost} with NCCL's words.
class Communicator {
 public:
  /// @pre the rank's device is current. Rank 0's id travels through @p group.
  /// @param max_cta  Most thread blocks that NCCL may use; 0 for its own choice.
  Communicator(Group& group, int max_cta, Deadline deadline);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Queues one group of sends and receives.
  void exchange(std::span<const Message> sends, std::span<const Message> receives,
                cudaStream_t stream, Deadline deadline);
  /// Throws when the library has found an error by itself.
  void poll() const;
  /// Ends everything under way. Returns within seconds, whatever the peers do.
  void abort() noexcept;
  bool aborted() const noexcept { return aborted_; }

  ncclComm_t handle() const noexcept { return comm_; }
  /// Waits until a call of a communicator that does not block is over.
  void finish(ncclResult_t result, const char* doing, Deadline deadline) const;

 private:
  ncclComm_t comm_ = nullptr;
  int device_ = 0;
  std::atomic<bool> aborted_{false};
};

/// Of the library that is loaded: 22809 is 2.28.9.
int library_version();

}  // namespace m2n::nccl
