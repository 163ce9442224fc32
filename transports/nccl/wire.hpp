// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How the regions of a pair of ranks become messages. Both ranks cut alike, each from its own copy
/// of the plan: nothing here depends on addresses. No CUDA here.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/plan/plan.hpp"
#include "transports/common/parts.hpp"
#include "transports/nccl/tables.hpp"

namespace m2n::nccl {

struct WireLimits {
  std::uint64_t chunk_bytes = 32 << 20;   ///< Staged bytes of a pair in one step.
  std::uint64_t direct_bytes = 4 << 20;   ///< From here on a contiguous region is not staged.
  std::uint64_t step_bytes = 1ULL << 30;  ///< Unstaged bytes of a pair in one step.

  friend auto operator<=>(const WireLimits&, const WireLimits&) = default;
};

/// Chunk of every pair, when @p peers is the largest number of messages that a rank has under way
/// in a step: two steps share @p staging_bytes.
std::uint64_t chunk_bytes_for(std::uint64_t staging_bytes, std::uint64_t peers);

/// What a pair moves in one step: one message for the staged parts, if any, then one a direct part.
struct PairStep {
  std::vector<Part> staged;
  std::uint64_t staged_bytes = 0;
  std::vector<Part> direct;
};

/// Cuts the regions of a pair of ranks, in the order that both share, into steps.
std::vector<PairStep> cut_pair(std::span<const StridedCopy> regions, const WireLimits& limits);

/// A message: a run of bytes to or from a peer.
struct Message {
  Rank peer = 0;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

/// One step of one rank: pack, exchange in one group, unpack. Steps alternate between two slots.
struct WireStep {
  ListSlice pack;
  ListSlice unpack;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

/// The regions between this rank and one peer, in one direction and stage.
struct PairRegions {
  Rank peer = 0;
  std::vector<Placed> regions;  ///< The address of the peer's side is not used.
};

/// Staging memory of one rank: slot s begins at address + s * slot_bytes.
struct Staging {
  std::uint64_t address = 0;
  std::uint64_t slot_bytes = 0;
};
/// Bytes of one slot for so many pairs.
std::uint64_t slot_bytes_for(std::size_t pairs, const WireLimits& limits);

/// Steps of one stage. @pre staging.slot_bytes >= slot_bytes_for(sends.size() + receives.size()).
std::vector<WireStep> compile_wire(std::span<const PairRegions> sends,
                                   std::span<const PairRegions> receives, const WireLimits& limits,
                                   const Staging& staging, Tables& tables);

}  // namespace m2n::nccl
