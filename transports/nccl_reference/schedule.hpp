// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The transfers that trainers use today, as steps of one rank: messages, broadcasts of whole
/// tensors, and the copies around them. Every rank makes its own, from what all know, and all pair
/// up. No CUDA here.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/plan/plan.hpp"

namespace m2n::nccl_reference {

/// Of what lies in packs and staging memory.
constexpr std::uint64_t kAlign = 256;
constexpr std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

/// Memory that a step touches. A slot area has two slots, used by turns of the steps.
enum class Area : std::uint8_t {
  source,       ///< A buffer of the rank as a source.
  destination,  ///< A buffer of the rank as a destination.
  scratch,      ///< Of the plan.
  full,         ///< Slots of whole tensors, one after the other.
  outgoing,     ///< Slots of what is sent and does not lie in one piece.
  incoming,     ///< Slots of what has come and does not belong in one piece.
};

struct Place {
  Area area = Area::source;
  std::uint32_t buffer = 0;
  std::uint64_t offset_bytes = 0;  ///< In the buffer, or in the slot.

  friend bool operator==(const Place&, const Place&) = default;
};

struct Copy {
  StridedCopy copy;
  Place from;
  Place to;
};

struct Transfer {
  Rank peer = 0;
  Place at;
  std::uint64_t bytes = 0;
};

/// One step, in this order: copies on the packing stream; sends and receives in one group, or each
/// alone, on the exchange stream; copies there; a broadcast; copies on the unpacking stream.
struct Step {
  bool barrier = false;  ///< Everything before is over first.
  std::vector<Copy> pack;
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  std::vector<Copy> gather;
  Place whole;                        ///< What is broadcast, on the root or on a worker.
  std::uint64_t broadcast_bytes = 0;  ///< 0: no broadcast.
  std::vector<Copy> unpack;

  bool empty() const {
    return pack.empty() && sends.empty() && receives.empty() && gather.empty() &&
           broadcast_bytes == 0 && unpack.empty();
  }
};

struct Schedule {
  std::vector<Step> steps;
  Rank root = -1;                ///< Of broadcasts; -1: none.
  std::vector<Rank> members;     ///< Of broadcasts: the root and the workers.
  std::uint64_t full_bytes = 0;  ///< Of a slot of each area.
  std::uint64_t outgoing_bytes = 0;
  std::uint64_t incoming_bytes = 0;
  std::uint64_t scratch_bytes = 0;
  /// [from, to]: bytes between this rank and others.
  std::map<std::pair<Rank, Rank>, std::uint64_t> traffic;
  std::uint64_t copied_bytes = 0;  ///< From the rank to itself.
};

/// The plan's regions by messages: one group a parameter, or one call a region. Regions that are no
/// runs of bytes on a side are packed there. @throws Error{unavailable} for a cast.
Schedule by_messages(const Program& program, bool call_per_region);

/// Whole tensors to every worker from the first source rank, which gathers them before, whatever
/// the plan: several tensors at a time in packs of at most @p pack_bytes, or, when that is 0, one
/// tensor at a time, which is then sent and received in place where it lies whole. Each worker
/// copies its part. A tensor larger than a pack is one of its own. @throws Error{unavailable} for a
/// cast.
Schedule by_broadcast(const Program& program, std::uint64_t pack_bytes);

}  // namespace m2n::nccl_reference
