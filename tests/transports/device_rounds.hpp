// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Random problems whose buffers lie on a device, or in host memory, or in both: over any device
/// that memory_of() knows. Bodies of ranks throw what is wrong.

#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/api/memory.hpp"
#include "core/api/transport.hpp"
#include "tests/transports/placed_memory.hpp"

namespace m2n::testing {

/// Which buffers of a rank lie on its device.
enum class OnDevice : std::uint8_t { all, sources, destinations, some };

/// One rank's memory for a random problem, at any alignment. Destinations are 0xCD before a round.
class LentMemory {
 public:
  LentMemory(const PlacedProblem& placed, Rank rank, OnDevice which, int device,
             std::mt19937_64& random);

  const Buffers& buffers() const { return buffers_; }
  void clear_destinations();
  std::vector<HostBytes> destinations() const;

 private:
  PlacedMemory memory_;
  std::unique_ptr<Arena> arena_;
  Buffers buffers_;
};

/// Moves problems @p seed, seed + 1, ..., two rounds each, over one connection of @p transport.
/// @return the paths that were reported.
std::set<std::string> move_random_problems(Group& group, Transport& transport, int device,
                                           std::uint64_t seed, std::uint64_t cases);

}  // namespace m2n::testing
