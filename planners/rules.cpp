// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Planners that decide atom by atom, without regard to the load of other parameters: "striped",
/// and the rules of two other systems.

#include <algorithm>

#include "core/api/plugins.hpp"
#include "planners/common/lanes.hpp"

namespace m2n {
namespace {

/// The copies of an atom, end to end, cut into one equal part a holder.
class EvenSplitter final : public Splitter {
 public:
  explicit EvenSplitter(const std::vector<Lane>& lanes) : lanes_(lanes) {}

  void split(std::uint32_t lane, std::uint32_t copy, std::uint32_t, std::uint64_t,
             std::uint64_t bytes, std::vector<LanePart>& out) const override {
    const std::uint64_t holders = lanes_[lane].holders.size();
    const std::uint64_t copies = lanes_[lane].receivers.size();
    // Holder h serves [h, h + 1) * copies / holders, in copies.
    std::uint64_t begin = 0;
    for (std::uint64_t h = copy * holders / copies; h < holders && begin < bytes; ++h) {
      const std::uint64_t whole = (h + 1) * copies / holders;  // copies that end in h's part
      std::uint64_t end = bytes;
      if (whole == copy) {
        const std::uint64_t rest = (h + 1) * copies % holders;  // of a copy, in 1 / holders
        end = bytes / holders * rest + bytes % holders * rest / holders;
      }
      if (end > begin) {
        out.push_back({static_cast<std::uint32_t>(h), begin, end});
        begin = end;
      }
    }
  }

 private:
  const std::vector<Lane>& lanes_;
};

class StripedPlanner final : public Planner {
 public:
  std::string_view name() const noexcept override { return "striped"; }

 private:
  void do_plan(const Topology& topology, PlanBuilder& builder) const override {
    const FlowClasses classes(builder.problem());
    topology.require(classes.world_size());
    const std::vector<Lane> lanes = island_lanes(classes, Ports(topology));
    add_direct(builder, classes, lanes, EvenSplitter(lanes));
  }
};

/// One holder a receiver.
class PickSplitter final : public Splitter {
 public:
  using Pick = std::size_t (*)(const Lane& lane, std::size_t receiver);
  PickSplitter(const std::vector<Lane>& lanes, Pick pick) : lanes_(lanes), pick_(pick) {}

  void split(std::uint32_t lane, std::uint32_t copy, std::uint32_t, std::uint64_t,
             std::uint64_t bytes, std::vector<LanePart>& out) const override {
    out.push_back({static_cast<std::uint32_t>(pick_(lanes_[lane], copy)), 0, bytes});
  }

 private:
  const std::vector<Lane>& lanes_;
  Pick pick_;
};

/// More source replicas than destination replicas: one source a destination, the rest idle.
/// Otherwise each source serves a contiguous block of destinations, by count.
std::size_t m2n_uniform(const Lane& lane, std::size_t receiver) {
  const std::size_t holders = lane.holders.size();
  const std::size_t receivers = lane.receivers.size();
  return holders > receivers ? receiver : receiver * holders / receivers;
}

/// The receiver's global rank, modulo the source replicas.
std::size_t megatron_round_robin(const Lane& lane, std::size_t receiver) {
  return static_cast<std::size_t>(lane.receivers[receiver]) % lane.holders.size();
}

class PickPlanner final : public Planner {
 public:
  PickPlanner(std::string_view name, PickSplitter::Pick pick) : name_(name), pick_(pick) {}
  std::string_view name() const noexcept override { return name_; }

 private:
  void do_plan(const Topology&, PlanBuilder& builder) const override {
    const FlowClasses classes(builder.problem());
    const std::vector<Lane> lanes = whole_lanes(classes);
    add_direct(builder, classes, lanes, PickSplitter(lanes, pick_));
  }

  std::string_view name_;
  PickSplitter::Pick pick_;
};

}  // namespace

void add_planner_striped(Registries& registries) {
  registries.planners.add("striped", "all holders of a box send equal parts of it",
                          [](const PlannerContext& context) {
                            require_no_options("planner 'striped'", context.options);
                            return std::make_unique<StripedPlanner>();
                          });
}

void add_planner_m2n_uniform(Registries& registries) {
  registries.planners.add("m2n_uniform",
                          "NVIDIA's UNIFORM rule: blocks of destination replicas by count",
                          [](const PlannerContext& context) {
                            require_no_options("planner 'm2n_uniform'", context.options);
                            return std::make_unique<PickPlanner>("m2n_uniform", &m2n_uniform);
                          });
}

void add_planner_megatron_round_robin(Registries& registries) {
  registries.planners.add(
      "megatron_round_robin", "Megatron's rule: destination rank modulo source replicas",
      [](const PlannerContext& context) {
        require_no_options("planner 'megatron_round_robin'", context.options);
        return std::make_unique<PickPlanner>("megatron_round_robin", &megatron_round_robin);
      });
}

}  // namespace m2n
