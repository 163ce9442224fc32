// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Random resharding problems, and, told apart from every layout class, where each element belongs.

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/plan/problem.hpp"

namespace m2n::testing {

/// One element of one parameter, in a buffer of one rank.
struct Place {
  std::uint32_t parameter = 0;
  Index flat = 0;  ///< Global row-major index.
  std::uint64_t offset_bytes = 0;
};

/// Where everything is, worked out element by element from index lists (who owns element k?).
struct Truth {
  std::map<std::pair<Rank, std::string>, std::vector<Place>> source;
  std::map<std::pair<Rank, std::string>, std::vector<Place>> destination;
};

struct PlacedProblem {
  Problem problem;
  Truth truth;
};

/// What to draw from.
struct PlacedLimits {
  Rank ranks = 8;        ///< Of the world; sources and destinations may overlap.
  Index elements = 160;  ///< Of one tensor, about.
  std::size_t parameters = 3;
  bool views = true;  ///< Fused and transposed buffers, odd offsets.
  bool casts = true;
  /// With casts: now and then a parameter more, "q", that is quantised under "q_scales".
  bool quantised = true;
};

/// Tensors of rank 0 to 4, meshes of 1 to 3 axes over permuted and gapped ranks, even, uneven,
/// empty, strided and replicated shards, FSDP1 flat units, and, with views, local tensors
/// transposed, padded and fused into shared buffers at odd offsets.
PlacedProblem placed_problem(std::mt19937_64& random, const PlacedLimits& limits = {});

/// Bits of element @p flat of @p parameter at the source: differs between elements and parameters.
std::uint64_t test_bits(DType dtype, std::uint32_t parameter, Index flat);

/// What a problem's elements are at the source and must be at the destination, by an own rule, an
/// element at a time. Those that are quantised are of moderate size; among them are zeros of either
/// sign, some below the normal numbers, blocks of zeros, and some that differ by much.
class TestValues {
 public:
  explicit TestValues(const Problem& problem);

  /// Of parameters that hold scales: what a source finds there before it computes them.
  std::uint64_t source(std::uint32_t parameter, Index flat) const;
  std::uint64_t destination(std::uint32_t parameter, Index flat) const;

 private:
  const Problem& problem_;
  std::map<std::uint32_t, std::vector<float>> scales_;  ///< By the parameter that holds them.
};

}  // namespace m2n::testing
