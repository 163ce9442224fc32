// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Classes: all bytes of a problem that the same ranks hold and the same ranks need, together.
/// Bounds and planners work on classes, so their cost does not grow with the parameters.

#include <cstdint>
#include <vector>

#include "core/plan/atoms.hpp"
#include "core/plan/plan_builder.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// Bytes are at the destination's dtype: what travels.
struct FlowClass {
  std::uint32_t holders = 0;    ///< Rank set that holds them. Never empty.
  std::uint32_t receivers = 0;  ///< Rank set that needs them and does not hold them. Never empty.
  std::uint64_t bytes = 0;      ///< Counted once, over all parameters.
};

/// One geometry, taken apart.
struct GeometryFlow {
  GeometryGroup group;
  Atoms atoms;
  std::vector<std::uint32_t> class_of;  ///< [atom]; kNone where every receiver is a holder.
  std::vector<std::uint64_t> offset;    ///< [atom] bytes of its class before it in this geometry.

  static constexpr std::uint32_t kNone = 0xffffffffU;
};

class FlowClasses {
 public:
  /// @throws Error{bad_plan} when a destination box has no holder.
  explicit FlowClasses(const Problem& problem);

  const std::vector<FlowClass>& classes() const noexcept { return classes_; }
  const std::vector<GeometryFlow>& geometries() const noexcept { return geometries_; }
  /// Sorted, without repeats.
  const std::vector<Rank>& ranks(std::uint32_t set) const { return sets_[set]; }
  std::size_t set_count() const noexcept { return sets_.size(); }
  /// Bytes that a rank needs and holds itself, [rank].
  const std::vector<std::uint64_t>& local_bytes() const noexcept { return local_bytes_; }
  Rank world_size() const noexcept { return static_cast<Rank>(local_bytes_.size()); }

  /// A class's bytes in one parameter of a geometry.
  struct Share {
    std::uint32_t geometry = 0;
    std::uint64_t bytes = 0;
  };
  const std::vector<Share>& shares(std::uint32_t number) const { return shares_[number]; }

 private:
  std::vector<FlowClass> classes_;
  std::vector<std::vector<Share>> shares_;  // [class], by geometry
  std::vector<GeometryFlow> geometries_;
  std::vector<std::vector<Rank>> sets_;
  std::vector<std::uint64_t> local_bytes_;
};

}  // namespace m2n
