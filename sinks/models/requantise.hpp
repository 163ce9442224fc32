// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// f8 weights that a worker quantises anew after they have landed, in place: fused parts under one
/// scale, blocks under powers of two.

#include <string>
#include <vector>

#include "core/api/model.hpp"

namespace m2n::models {

/// Which scales a worker's kernels want.
enum class Requantise : std::uint8_t {
  no,            ///< Those of the checkpoint.
  one_scale,     ///< Of a weight, fused or not, one: the largest of its parts.
  power_of_two,  ///< Of every block the next power of two that is not less.
};

/// What was fused: rows of each part in a worker's weight, [experts,] rows, columns.
struct FusedRows {
  std::string weight;
  std::string scales;
  std::vector<Index> rows;
};

/// Scales are one a part, [experts,] parts; all of a weight (of an expert) become the largest.
Rewrite rewrite_for_one_scale(const FusedRows& fused);
/// That scale alone, [experts], as @p name.
DerivedTensor largest_scale(const std::string& name, const FusedRows& fused, Index experts);

/// Scales are one a block of @p block_rows by @p block_columns; a part begins with a block.
Rewrite rewrite_for_powers_of_two(const FusedRows& fused, Index block_rows, Index block_columns);

}  // namespace m2n::models
