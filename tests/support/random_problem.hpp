// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Random problems of every kind that layouts allow, random clusters, and plans run element by
/// element.

#include <random>
#include <string>

#include "core/plan/plan.hpp"
#include "core/plan/topology.hpp"

namespace m2n::testing {

/// Numbers below @p n, equal on every platform.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }
  Index between(Index low, Index high) {
    return low + static_cast<Index>(below(static_cast<std::uint64_t>(high - low + 1)));
  }
  bool chance(std::uint64_t percent) { return below(100) < percent; }

 private:
  std::mt19937_64 engine_;
};

/// One to four parameters over up to eight ranks: scalars and tensors of up to three dimensions,
/// extents from 0, meshes of one or two axes in any rank order with replication, shards and strided
/// shards, explicit pieces with overlapping sources, and ranks on both sides.
Problem random_problem(Dice& dice);

/// Islands of any sizes with private or shared NICs, or one island.
Topology random_topology(Dice& dice, Rank ranks);

/// Runs @p plan over buffers of numbered elements, stage after stage, and compares every
/// destination element with its number. @return what is wrong first, or nothing.
std::string run_and_compare(const Plan& plan, const Problem& problem);

}  // namespace m2n::testing
