// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// An example plug-in: a planner that lets the last holder of each box send it.

#include <memory>
#include <string_view>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/plan/atoms.hpp"

namespace {

class LastHolder final : public m2n::Planner {
 public:
  std::string_view name() const noexcept override { return "last_holder"; }

 private:
  void do_plan(const m2n::Topology& /*topology*/, m2n::PlanBuilder& builder) const override {
    for (const m2n::GeometryGroup& group : m2n::group_by_geometry(builder.problem())) {
      m2n::Pattern pattern;
      pattern.geometry = group.geometry;
      const m2n::Atoms atoms(group.geometry);
      for (std::size_t i = 0; i < atoms.size(); ++i) {
        const m2n::Atom atom = atoms[i];
        const auto box = static_cast<std::uint32_t>(pattern.boxes.size());
        pattern.boxes.push_back(atom.box);
        for (const std::uint32_t receiver : atom.receivers) {
          pattern.moves.push_back({.box = box, .from = atom.holders.back(), .to = receiver});
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

M2N_PLUGIN(registries) {
  registries.planners.add("last_holder", "the last rank that holds a box sends it; no options",
                          [](const m2n::PlannerContext& context) {
                            m2n::require_no_options("planner 'last_holder'", context.options);
                            return std::make_unique<LastHolder>();
                          });
}
