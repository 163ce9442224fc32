// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planner "direct": the first holder of every atom sends it to each receiver.

#include "core/api/planner.hpp"
#include "core/api/plugins.hpp"
#include "core/plan/atoms.hpp"

namespace m2n {
namespace {

class DirectPlanner final : public Planner {
 public:
  std::string_view name() const noexcept override { return "direct"; }

 private:
  void do_plan(const Topology&, PlanBuilder& builder) const override {
    for (const GeometryGroup& group : group_by_geometry(builder.problem())) {
      const Atoms atoms = make_atoms(builder.problem(), group);
      Pattern pattern;
      pattern.geometry = group.geometry;
      pattern.boxes.reserve(atoms.size());
      for (std::size_t i = 0; i < atoms.size(); ++i) {
        const Atom atom = atoms[i];
        pattern.boxes.push_back(atom.box);
        for (const std::uint32_t receiver : atom.receivers) {
          // A rank that holds the atom itself copies it; otherwise the lowest rank sends.
          std::uint32_t sender = atom.holders.front();
          for (const std::uint32_t holder : atom.holders) {
            if (pattern.rank_of(holder) == pattern.rank_of(receiver)) {
              sender = holder;
              break;
            }
          }
          pattern.moves.push_back({static_cast<std::uint32_t>(i), sender, receiver, 0});
        }
      }
      const std::uint32_t number = builder.add(std::move(pattern));
      for (const std::uint32_t parameter : group.parameters) {
        builder.assign(parameter, number);
      }
    }
  }
};

}  // namespace

void add_planner_direct(Registries& registries) {
  registries.planners.add("direct", "the first holder of every box sends it to each receiver",
                          [](const PlannerContext& context) {
                            require_no_options("planner 'direct'", context.options);
                            return std::make_unique<DirectPlanner>();
                          });
}

}  // namespace m2n
