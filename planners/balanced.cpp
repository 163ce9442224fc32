// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planner "balanced": no relays, and the busiest port is as idle as it can be. A receiver with
/// a holder in its island is served over links, any other over NICs; which holder serves how much
/// is an exact min-max over all parameters together.

#include "core/api/plugins.hpp"
#include "planners/common/lanes.hpp"

namespace m2n {
namespace {

class BalancedPlanner final : public Planner {
 public:
  std::string_view name() const noexcept override { return "balanced"; }

 private:
  void do_plan(const Topology& topology, PlanBuilder& builder) const override {
    const FlowClasses classes(builder.problem());
    topology.require(classes.world_size());
    const Ports ports(topology);
    const std::vector<Lane> lanes = island_lanes(classes, ports);
    add_direct(builder, classes, lanes, QuotaSplitter(classes, lanes, ports, false));
  }
};

}  // namespace

void add_planner_balanced(Registries& registries) {
  registries.planners.add("balanced",
                          "holders share so that the busiest port is done first (exact, no relays)",
                          [](const PlannerContext& context) {
                            require_no_options("planner 'balanced'", context.options);
                            return std::make_unique<BalancedPlanner>();
                          });
}

}  // namespace m2n
