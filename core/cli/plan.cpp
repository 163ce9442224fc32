// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n plan`: what moves between whom.

#include <boost/json.hpp>
#include <iostream>

#include "core/cli/commands.hpp"
#include "core/cli/dump.hpp"
#include "core/cli/explain.hpp"
#include "core/cli/job.hpp"
#include "core/cli/output.hpp"
#include "core/cli/planned_job.hpp"
#include "core/plan/traffic.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// Ranks and regions that a table shows before it says how many more there are.
constexpr Rank kTableRanks = 16;
constexpr std::size_t kTableRegions = 20;

void print_traffic(const Plan& plan, const Problem& problem) {
  if (problem.world_size() > kTableRanks) {
    std::cout << "\ntraffic: " << problem.world_size()
              << " ranks are too many for a table; --dump FILE holds the matrix\n";
    return;
  }
  const TrafficMatrix traffic = traffic_matrix(plan, problem);
  std::vector<std::string> header{"from \\ to"};
  for (Rank to = 0; to < problem.world_size(); ++to) {
    header.push_back("rank " + std::to_string(to));
  }
  Table table(std::move(header));
  for (Rank from = 0; from < problem.world_size(); ++from) {
    std::vector<std::string> row{"rank " + std::to_string(from)};
    for (Rank to = 0; to < problem.world_size(); ++to) {
      const auto bytes = traffic.coeff(from, to);
      row.push_back(bytes == 0 ? "-" : human_bytes(static_cast<std::uint64_t>(bytes)));
    }
    table.add(std::move(row));
  }
  std::cout << "\ntraffic\n" << table.text();
}

void print_regions(const Plan& plan, const Problem& problem) {
  Table table({"parameter", "stage", "from", "to", "box", "bytes"});
  std::size_t shown = 0;
  for (std::size_t i = 0; i < plan.pattern_of.size() && shown < kTableRegions; ++i) {
    const Pattern& pattern = plan.patterns[plan.pattern_of[i]];
    for (const Move& move : pattern.moves) {
      if (shown++ == kTableRegions) {
        break;
      }
      table.add({problem.parameters()[i].name, std::to_string(plan.first_stage[i] + move.stage),
                 std::to_string(pattern.rank_of(move.from)),
                 std::to_string(pattern.rank_of(move.to)), to_string(pattern.boxes[move.box]),
                 std::to_string(pattern.move_bytes(move))});
    }
  }
  std::cout << "\nregions\n" << table.text();
}

}  // namespace

int plan_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  Progress progress(!experiment.json);
  progress.phase("reading");
  const Job job(experiment);
  if (experiment.explain) {
    progress.phase("");
    std::cout << (experiment.json ? json::serialize(explain_json(job)) + '\n' : explain_text(job));
    return 0;
  }
  progress.phase("planning");
  const PlannedJob planned(job);
  const Certificate& certificate = planned.certificate;
  if (!experiment.dump.empty()) {
    progress.phase("dumping");
    Dump dump(job, planned.plan);
    dump.add_usage(planned.plan);
    dump.add_facts({{"certificate", to_json(certificate)}});
    dump.commit();
  }
  progress.phase("");
  if (experiment.json) {
    std::cout << json::serialize(planned.json()) << '\n';
    return 0;
  }
  std::cout << planned.table().text() << '\n' << to_text(certificate);
  print_traffic(planned.plan, job.problem());
  print_regions(planned.plan, job.problem());
  if (certificate.summary.regions > kTableRegions) {
    std::cout << "and " << certificate.summary.regions - kTableRegions
              << " more; --dump FILE holds all of them\n";
  }
  return 0;
}

}  // namespace m2n::cli
