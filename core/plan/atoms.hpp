// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Atoms: the largest boxes of a geometry on which the sets of holders and receivers are constant.

#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/plan.hpp"

namespace m2n {

/// Holders and receivers are holding numbers of the geometry (see Move), ascending, so by rank.
struct Atom {
  Box box;
  std::span<const std::uint32_t> holders;
  std::span<const std::uint32_t> receivers;
};

/// All atoms of a geometry that something needs. Owns the lists that the atoms point into.
class Atoms {
 public:
  /// @throws Error{bad_plan} naming the first box that a destination needs and no source holds.
  explicit Atoms(const Geometry& geometry);

  std::size_t size() const noexcept { return boxes_.size(); }
  Atom operator[](std::size_t i) const;

 private:
  std::vector<Box> boxes_;
  std::vector<std::uint32_t> holder_set_;    // [atom] -> set
  std::vector<std::uint32_t> receiver_set_;  // [atom] -> set
  std::vector<std::vector<std::uint32_t>> holder_sets_;
  std::vector<std::vector<std::uint32_t>> receiver_sets_;
};

}  // namespace m2n
