// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Planners: from two layouts to a plan.

#include <string_view>

#include "core/api/registry.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/plan_builder.hpp"
#include "core/plan/topology.hpp"

namespace m2n {

/// Turns a problem into a plan.
///
/// A pure function of its arguments and the options it was made with: no clock, no environment, no
/// unseeded randomness, no communication. Ranks run it apart and must agree.
///
/// - Collective: no.
/// - Threads: plan() may be called from several threads.
/// - Memory: holds nothing of its arguments.
/// - Streams: none.
/// - Errors: Error{bad_plan} naming what cannot be planned.
///
/// Postcondition of every plan: check_plan() passes.
class Planner {
 public:
  Planner() = default;
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;
  virtual ~Planner() = default;

  /// Registry name, e.g. "direct". Stable: it is written into dumps.
  virtual std::string_view name() const noexcept = 0;

  Plan plan(const Problem& problem, const Topology& topology) const {
    PlanBuilder builder(problem, std::string(name()));
    do_plan(topology, builder);
    return std::move(builder).finish();
  }

  /// The same plan, same digest, holding only the moves that touch @p rank.
  Plan plan_for(const Problem& problem, const Topology& topology, Rank rank) const {
    PlanBuilder builder(problem, std::string(name()), rank);
    do_plan(topology, builder);
    return std::move(builder).finish();
  }

 private:
  /// Adds patterns and assigns every parameter of builder.problem().
  virtual void do_plan(const Topology& topology, PlanBuilder& builder) const = 0;
};

struct PlannerContext {
  Options options;
};
using PlannerRegistry = Registry<Planner, PlannerContext>;

}  // namespace m2n
