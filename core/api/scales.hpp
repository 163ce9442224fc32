// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The scales that a rank of the source computes before a round.

#include <cstdint>
#include <vector>

#include "core/api/memory.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// Where the scales of @p box of @p parameter, which is quantised, lie on @p rank. @pre One piece
/// of the rank's source holds the box.
/// @param source  The rank's buffers by Problem::buffers(Role::source) number.
PlacedScales placed_scales(const Problem& problem, std::uint32_t parameter, Rank rank,
                           const Box& box, const std::vector<LocalBuffer>& source);

/// Writes the scales of everything that @p rank quantises, in the memory in which it lies: those of
/// every piece of its source into its piece of the parameter that holds them. Before every round,
/// once the weights are what they will be in it.
void compute_scales(const Problem& problem, Rank rank, const std::vector<LocalBuffer>& source);

}  // namespace m2n
