// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A communicator whose calls block, as most programs use NCCL: a call costs microseconds less than
/// one of a communicator that does not block, and must be made on a CallThread.

#include <nccl.h>

#include <atomic>
#include <memory>

#include "core/api/group.hpp"
#include "transports/nccl_common/call_thread.hpp"

namespace m2n::nccl {

/// Throws TransportError{peer_lost} with NCCL's words unless @p result is good. @p comm may be
/// null.
void require_nccl(ncclResult_t result, const std::string& doing, ncclComm_t comm);

/// - Collective: the constructors.
/// - Threads: one at a time; abort() from any.
/// - Errors: TransportError{timed_out, peer_lost} with NCCL's words.
class PlainCommunicator {
 public:
  /// Over all of @p group. @param who  "transport 'x'". @param max_cta  Most thread blocks that
  /// NCCL may use; 0 for its own choice.
  PlainCommunicator(std::string_view who, Group& group, std::shared_ptr<CallThread> thread,
                    int max_cta, Deadline deadline);
  /// Over the ranks of @p whole that say @p member. Every rank of it comes.
  PlainCommunicator(const PlainCommunicator& whole, bool member, Deadline deadline);
  ~PlainCommunicator();
  PlainCommunicator(const PlainCommunicator&) = delete;
  PlainCommunicator& operator=(const PlainCommunicator&) = delete;

  /// Null on a rank that is no member.
  ncclComm_t handle() const noexcept { return made_->comm; }
  /// Throws when the library has found an error by itself.
  void poll() const;
  /// Ends everything under way. Returns within seconds, whatever the peers do.
  void abort() noexcept;
  bool aborted() const noexcept { return aborted_; }

 private:
  /// What a call that never returns may still write to.
  struct Made {
    ncclComm_t comm = nullptr;
  };
  std::shared_ptr<CallThread> thread_;
  std::shared_ptr<Made> made_ = std::make_shared<Made>();
  int device_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace m2n::nccl
