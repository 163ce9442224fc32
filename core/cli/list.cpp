// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n list`: what is registered.

#include <boost/algorithm/string/join.hpp>
#include <boost/json.hpp>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/experiment.hpp"
#include "core/cli/output.hpp"
#include "core/engine/engine_options.hpp"

namespace m2n::cli {

int list_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  Registries registries = builtin_registries();
  for (const std::filesystem::path& file : experiment.plugins) {
    load_plugin(file, registries);
  }
  /// Of commands that move bytes, by the transport that they take when none is named.
  std::map<std::string, std::vector<std::string>> defaults;
  defaults[default_transport(registries, RanksAre::threads, MemorySpace::host)] = {"run", "replay",
                                                                                   "bench"};
  for (const char* const command : {"launch", "trainer", "worker"}) {
    defaults[default_transport(registries, RanksAre::processes, MemorySpace::host)].push_back(
        command);
  }
  Table table({"kind", "name", "what it does"});
  boost::json::array list;
  const auto add = [&](const auto& registry) {
    for (const auto& [name, entry] : registry.entries()) {
      boost::json::object object{
          {"kind", registry.kind()}, {"name", name}, {"summary", entry.summary}};
      std::string summary = entry.summary;
      const auto found = defaults.find(name);
      if (registry.kind() == registries.transports.kind() && found != defaults.end()) {
        summary += "; the default of " + boost::algorithm::join(found->second, ", ");
        object["default_of"] = boost::json::array(found->second.begin(), found->second.end());
      }
      table.add({registry.kind(), name, summary});
      list.push_back(std::move(object));
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
