// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Meshes and placements: what each axis of an arrangement of ranks does to a tensor.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor/shape.hpp"

namespace m2n {

/// Position in the world: trainers are [0, T), workers [T, T + N) unless ranks play both parts.
using Rank = std::int32_t;

/// N-d arrangement of ranks, row-major: the rank at coordinate c is
/// ranks[sum_m c_m * prod_{l>m} dims_l]. Immutable.
class Mesh {
 public:
  /// Contiguous ranks from @p start.
  /// @throws Error{bad_argument} for no axis, more than kMaxRank axes, an extent below 1, or a
  ///         rank that is negative or too large.
  Mesh(Dims dims, Rank start);
  /// Any list, row-major. @throws also when the count differs from the product, or a rank repeats.
  Mesh(Dims dims, std::vector<Rank> ranks);

  const Dims& dims() const noexcept { return dims_; }
  const std::vector<Rank>& ranks() const noexcept { return ranks_; }
  std::size_t size() const noexcept { return ranks_.size(); }
  /// Coordinate of the @p position-th rank of the list.
  Dims coordinate(std::size_t position) const;
  /// The first rank when the list is contiguous and ascending.
  std::optional<Rank> contiguous_start() const;

  friend bool operator==(const Mesh&, const Mesh&) = default;

 private:
  Dims dims_;
  std::vector<Rank> ranks_;
};

/// What one mesh axis does to a tensor.
struct Placement {
  enum class Kind : std::uint8_t { replicate, shard, strided_shard };

  Kind kind = Kind::replicate;
  int dim = 0;             ///< Tensor dimension; 0 for replicate. Never negative here.
  Index split_factor = 1;  ///< Of strided_shard.

  static Placement replicate() { return {}; }
  static Placement shard(int dim) { return {Kind::shard, dim, 1}; }
  static Placement strided_shard(int dim, Index split_factor) {
    return {Kind::strided_shard, dim, split_factor};
  }
  friend bool operator==(const Placement&, const Placement&) = default;
};

/// "Replicate", "Shard(0)", "StridedShard(0,2)".
std::string to_string(const Placement& placement);

/// Parses the spellings above, blanks allowed. A negative dim counts from @p tensor_rank.
/// @throws Error{bad_argument} for anything else; "Partial" is refused by name.
Placement placement_from_string(std::string_view text, std::size_t tensor_rank);

}  // namespace m2n
