// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Relabelling: which worker should play which shard, so that fewer bytes travel.

#include <cstdint>
#include <vector>

#include "core/plan/problem.hpp"
#include "core/plan/topology.hpp"

namespace m2n {

/// Bytes that workers need and do not hold, by where the nearest holder is.
struct RelabelBytes {
  std::uint64_t local = 0;   ///< Held by the rank itself.
  std::uint64_t island = 0;  ///< Held in its island, not by itself.
  std::uint64_t far = 0;     ///< Held in other islands only: bytes that enter the island.
};

struct Relabelling {
  /// [position among destination_ranks()] the rank that now plays this rank's part.
  std::vector<Rank> ranks;
  RelabelBytes before;
  RelabelBytes after;
};

/// The assignment of destination ranks to their parts that has least bytes between islands, and
/// among those least bytes between ranks: exact for the sum over workers, each looked at alone
/// (linear assignment). Bytes that several workers of an island need count for each of them.
/// Never worse than leaving all as it is. Cost: the cube of the workers.
Relabelling relabel(const Problem& problem, const Topology& topology);

/// The problem with the destination's parts handed out anew.
Problem relabelled(const Problem& problem, const Relabelling& relabelling);

}  // namespace m2n
