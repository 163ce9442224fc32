// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n list`: what is registered.

#include <boost/json.hpp>
#include <iostream>

#include "core/api/builtin.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/experiment.hpp"
#include "core/cli/output.hpp"

namespace m2n::cli {

int list_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  Registries registries = builtin_registries();
  for (const std::filesystem::path& file : experiment.plugins) {
    load_plugin(file, registries);
  }
  Table table({"kind", "name", "what it does"});
  boost::json::array list;
  const auto add = [&](const auto& registry) {
    for (const auto& [name, entry] : registry.entries()) {
      table.add({registry.kind(), name, entry.summary});
      list.push_back(boost::json::object{
          {"kind", registry.kind()}, {"name", name}, {"summary", entry.summary}});
    }
  };
  add(registries.planners);
  add(registries.transports);
  add(registries.sources);
  add(registries.values);
  add(registries.sinks);
  add(registries.models);
  if (experiment.json) {
    std::cout << boost::json::serialize(list) << '\n';
  } else {
    std::cout << table.text();
  }
  return 0;
}

}  // namespace m2n::cli
