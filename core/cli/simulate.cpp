// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n simulate`: the plan on a described cluster.

#include "core/plan/simulate.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <iostream>

#include "core/cli/commands.hpp"
#include "core/cli/dump.hpp"
#include "core/cli/planned_job.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// Ports that the table shows, the busiest first.
constexpr std::size_t kTablePorts = 12;

void print_ports(std::vector<Timeline::Port> ports, double seconds) {
  std::stable_sort(ports.begin(), ports.end(),
                   [](const auto& a, const auto& b) { return a.busy > b.busy; });
  Table table({"port", "bytes", "busy", "of the round"});
  for (std::size_t i = 0; i < std::min(kTablePorts, ports.size()); ++i) {
    table.add({ports[i].name, human_bytes(ports[i].bytes), human_seconds(ports[i].busy),
               fixed(100 * ports[i].busy / seconds, 1) + " %"});
  }
  std::cout << '\n' << table.text();
  if (ports.size() > kTablePorts) {
    std::cout << "and " << ports.size() - kTablePorts << " more\n";
  }
}

}  // namespace

int simulate_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  Progress progress(!experiment.json);
  progress.phase("reading");
  const Job job(experiment);
  progress.phase("planning");
  const PlannedJob planned(job);
  progress.phase("simulating");
  const Timeline timeline =
      simulate(planned.plan, job.problem(), job.topology(), experiment.simulation);
  if (!experiment.dump.empty()) {
    progress.phase("dumping");
    Dump dump(job, planned.plan);
    dump.add_usage(planned.plan);
    dump.add_facts({{"certificate", to_json(planned.certificate)}});
    dump.add_timeline(timeline);
    dump.commit();
  }
  progress.phase("");
  const double bound = planned.certificate.bounds.seconds();
  const double ratio = bound > 0 ? timeline.seconds / bound : 1;
  if (experiment.json) {
    json::object out = planned.json();
    out["simulated_seconds"] = timeline.seconds;
    out["ratio"] = ratio;
    out["events"] = timeline.events.size();
    json::array ports;
    for (const Timeline::Port& port : timeline.ports) {
      ports.push_back(
          json::object{{"port", port.name}, {"bytes", port.bytes}, {"busy_seconds", port.busy}});
    }
    out["ports"] = std::move(ports);
    std::cout << json::serialize(out) << '\n';
    return 0;
  }
  Table table = planned.table();
  table.add({"simulated", human_seconds(timeline.seconds) + " for " +
                              std::to_string(timeline.events.size()) + " messages"});
  table.add({"bound", human_seconds(bound) + " for any plan (" +
                          planned.certificate.bounds.best().name + ": " +
                          planned.certificate.bounds.best().binds + ")"});
  table.add({"simulated / bound", fixed(ratio, 3)});
  std::cout << table.text();
  print_ports(timeline.ports, timeline.seconds);
  return 0;
}

}  // namespace m2n::cli
