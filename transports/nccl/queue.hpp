// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Puts the rounds of a session on streams. How a round runs is said in queue.cpp.

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "transports/nccl/compile.hpp"
#include "transports/nccl/session.hpp"
#include "transports/nccl/streams.hpp"

namespace m2n::nccl {

/// - Threads: one at a time.
/// - Memory: everything that it is made from must outlive it.
/// - Errors: TransportError from the runtime.
class RoundQueue {
 public:
  /// The device of @p connection must be current, here and in every call.
  RoundQueue(Connection& connection, const SessionMemory& memory, const Links& links,
             CompiledRound& round, const DeviceRound& device_round, const Control& control);
  ~RoundQueue();
  RoundQueue(const RoundQueue&) = delete;
  RoundQueue& operator=(const RoundQueue&) = delete;

  /// Begins round @p round, after what the caller's stream has still to do, and queues what can be
  /// queued without waiting for a gate.
  void begin(std::uint64_t round, Deadline deadline);
  /// True when all of the round is queued.
  bool complete() const { return next_stage_ > compiled_.stages.size(); }
  /// Queues more of the round if a gate has opened. True when it did.
  bool pump(Deadline deadline);

  /// For what goes along with the round in progress.
  cudaStream_t main() const { return streams_->main; }
  /// The round in progress has succeeded: its streams go back to the connection.
  void end();
  /// True when what the session has queued is done before @p deadline. Ends the round in progress.
  bool drain(Deadline deadline) noexcept;

 private:
  Entry entry_for(const Range& gates, std::uint32_t opened);
  void queue_head(std::size_t s, bool captured);
  void queue_engine(std::size_t s, bool captured);
  void queue_permissions(std::size_t s);
  void queue_wire(const std::vector<WireStep>& steps);
  void queue_last();
  void capture();
  cudaStream_t caller_stream() const;

  Connection& connection_;
  const SessionMemory& memory_;
  CompiledRound& compiled_;
  const DeviceRound& device_round_;
  const Control& control_;
  bool alone_on_device_;
  bool uses_wire_;

  std::unique_ptr<Streams> streams_;  // of the round in progress
  Event last_round_;                  // after all that the last round queued
  Event caller_;
  Event fork_;
  Event engine_done_;
  Event wire_done_;
  Event wire_sent_;
  std::vector<std::unique_ptr<Event>> packed_;  // by slot
  std::vector<std::unique_ptr<Event>> moved_;
  std::vector<std::unique_ptr<Event>> unpacked_;
  cudaGraphExec_t graph_ = nullptr;

  // The round in progress.
  std::uint64_t round_ = 0;
  std::size_t next_stage_ = 0;
  bool head_queued_ = false;
  bool ready_due_ = false;  // no kernel of the round has carried the permissions yet
  bool ended_ = false;      // a kernel that is queued ends the round
  Deadline deadline_;
};

}  // namespace m2n::nccl
