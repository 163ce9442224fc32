// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What a planner fills: patterns, and which parameter follows which.

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/plan/atoms.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

/// Parameters that share a geometry, in declared order.
struct GeometryGroup {
  Geometry geometry;
  std::vector<std::uint32_t> parameters;
};

/// Groups in the order of their first parameter. Cost: linear in parameters and distinct layouts.
std::vector<GeometryGroup> group_by_geometry(const Problem& problem);

/// The group's atoms. @throws Error{bad_plan} naming the parameter and the box that nobody holds.
Atoms make_atoms(const Problem& problem, const GeometryGroup& group);

/// Collects a plan and digests it on the way. With @p only set, moves that do not touch that rank
/// are dropped as soon as they are digested: the rank's own program is the same, and so is the
/// digest, but the whole plan is never held.
class PlanBuilder {
 public:
  PlanBuilder(const Problem& problem, std::string planner, std::optional<Rank> only = {});

  const Problem& problem() const noexcept { return problem_; }

  /// Sorts the moves by stage (stable) and keeps the pattern. @return its number, for assign().
  std::uint32_t add(Pattern pattern);
  /// Every parameter must be assigned exactly once.
  void assign(std::uint32_t parameter, std::uint32_t pattern, std::uint32_t first_stage = 0);

  /// @throws Error{bad_plan} naming a parameter that was not assigned.
  Plan finish() &&;

 private:
  const std::string& layout_digest(const Layout& layout);

  const Problem& problem_;
  std::optional<Rank> only_;
  Plan plan_;
  std::vector<std::string> pattern_digests_;
  std::vector<std::uint32_t> pattern_stages_;
  std::unordered_map<const Layout*, std::string> layout_digests_;
};

}  // namespace m2n
