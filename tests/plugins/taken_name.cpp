// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A plug-in whose second planner has a name that is taken.

#include "core/api/plugins.hpp"

M2N_PLUGIN(registries) {
  const auto nothing = [](const m2n::PlannerContext&) { return std::unique_ptr<m2n::Planner>(); };
  registries.planners.add("first_of_two", "", nothing);
  registries.planners.add("first_of_two", "", nothing);
}
