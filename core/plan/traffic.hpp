// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Traffic: who sends how many bytes to whom, and what a rank's links and scratch do stage by
/// stage.

#include <Eigen/Core>
#include <cstdint>
#include <vector>

#include "core/plan/plan.hpp"

namespace m2n {

/// Bytes [from][to] at the destination's dtype; local copies stand on the diagonal.
using TrafficMatrix = Eigen::Matrix<std::uint64_t, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Cost: the distinct moves, and the square of the world.
TrafficMatrix traffic_matrix(const Plan& plan, const Problem& problem);

/// What one rank does in one stage.
struct StageUsage {
  std::uint32_t stage = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t copied_bytes = 0;   ///< Local copies.
  std::uint64_t scratch_bytes = 0;  ///< Scratch that holds bytes which are still to be passed on.
};

/// Stages in which @p rank does something, ascending. Cost: the rank's own moves of every parameter
/// and the distinct moves once.
std::vector<StageUsage> usage_of(const Plan& plan, const Problem& problem, Rank rank);

}  // namespace m2n
