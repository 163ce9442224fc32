// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A schedule with addresses, and the calls that run it once.

#include <nccl.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "core/layout/mesh.hpp"
#include "transports/nccl_common/called_session.hpp"
#include "transports/nccl_reference/runs.hpp"

namespace m2n::nccl_reference {

constexpr std::size_t kSlots = 2;

/// Copies of one phase of a step.
struct Copies {
  struct Plain {
    std::uint64_t source;
    std::uint64_t destination;
    std::uint64_t bytes;
  };
  std::vector<Plain> plain;    ///< A call each.
  std::vector<RunList> lists;  ///< A launch each.

  bool empty() const { return plain.empty() && lists.empty(); }
};

/// A step with addresses.
struct ReadyStep {
  struct Message {
    Rank peer;
    std::uint64_t address;
    std::uint64_t bytes;
  };
  bool barrier = false;
  bool slot = false;  ///< It uses one.
  Copies pack;
  std::vector<Message> sends;
  std::vector<Message> receives;
  Copies gather;
  std::uint64_t whole = 0;
  std::uint64_t broadcast_bytes = 0;
  Copies unpack;
};

/// A round's calls.
class Round final : public nccl::StreamWork {
 public:
  void run() override;

  std::vector<ReadyStep> steps;
  nccl::DeviceMemory table;  ///< Runs.
  ncclComm_t world = nullptr;
  ncclComm_t members = nullptr;
  int root = 0;  ///< In members.

 private:
  enum Lane : std::uint8_t { pack_lane, exchange_lane, broadcast_lane, unpack_lane, lanes };

  void join(cudaStream_t onto);

  /// Work of a step moves on to @p lane: after what it did before, or after the slot's last user.
  cudaStream_t enter(Lane lane, std::optional<Lane>& last, std::size_t slot, bool uses_slot);

  void queue(const ReadyStep& step, std::size_t slot);

  void exchange(const ReadyStep& step, cudaStream_t on);

  void copy(const Copies& copies, cudaStream_t on) const;

  std::array<nccl::Stream, lanes> lanes_;
  std::array<nccl::Event, lanes> lane_over_;
  std::array<nccl::Event, lanes> phase_over_;
  std::array<nccl::Event, kSlots> slot_over_;
  std::array<bool, kSlots> slots_used_{};
  nccl::Event start_;
};

}  // namespace m2n::nccl_reference
