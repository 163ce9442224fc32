// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank's host memory for a random problem: before a round, and what it must hold after it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/placed_problem.hpp"

namespace m2n::testing {

using HostBytes = std::vector<std::byte>;

struct PlacedMemory {
  std::vector<HostBytes> source;       ///< By number of the problem's buffers.
  std::vector<HostBytes> destination;  ///< Every byte 0xCD before a round.
};

inline std::vector<HostBytes> placed_buffers(const Problem& problem, Role role, Rank rank) {
  std::vector<HostBytes> buffers;
  for (const std::uint64_t bytes : problem.buffer_bytes(role, rank)) {
    buffers.emplace_back(bytes, std::byte{0xCD});
  }
  return buffers;
}

/// Calls @p put(buffer, place, parameter) for every element of @p rank on one side.
template <class Put>
void for_each_place(const PlacedProblem& placed, Role role, Rank rank, const Put& put) {
  const auto& side = role == Role::source ? placed.truth.source : placed.truth.destination;
  const std::vector<std::string>& names = placed.problem.buffers(role).names;
  for (const auto& [key, places] : side) {
    if (key.first == rank) {
      const auto buffer = std::find(names.begin(), names.end(), key.second) - names.begin();
      for (const Place& place : places) {
        put(static_cast<std::size_t>(buffer), place, placed.problem.parameters()[place.parameter]);
      }
    }
  }
}

inline PlacedMemory placed_memory(const PlacedProblem& placed, Rank rank) {
  PlacedMemory memory{placed_buffers(placed.problem, Role::source, rank),
                      placed_buffers(placed.problem, Role::destination, rank)};
  const TestValues values(placed.problem);
  for_each_place(placed, Role::source, rank,
                 [&](std::size_t buffer, const Place& place, const Parameter& p) {
                   const std::uint64_t bits = values.source(place.parameter, place.flat);
                   std::memcpy(memory.source[buffer].data() + place.offset_bytes, &bits,
                               bytes_of(p.source_dtype()));
                 });
  return memory;
}

inline std::vector<HostBytes> placed_expectation(const PlacedProblem& placed, Rank rank) {
  std::vector<HostBytes> out = placed_buffers(placed.problem, Role::destination, rank);
  const TestValues values(placed.problem);
  for_each_place(placed, Role::destination, rank,
                 [&](std::size_t buffer, const Place& place, const Parameter& p) {
                   const std::uint64_t bits = values.destination(place.parameter, place.flat);
                   std::memcpy(out[buffer].data() + place.offset_bytes, &bits,
                               bytes_of(p.destination_dtype()));
                 });
  return out;
}

}  // namespace m2n::testing
