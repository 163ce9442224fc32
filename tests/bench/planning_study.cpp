// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planners side by side: DeepSeek-V3 and Qwen3-235B over the ready topologies. A table on
/// stderr, one JSON line a row on stdout, and with --dump=FILE the same as HDF5
/// (/results/planners). Half of the ranks train, the others serve in replicas of up to eight. The
/// first time is the plan's own in the model of the certificate; the last is simulated with
/// proportional sharing, and 0 where a plan has more messages than
/// --most-messages=N (default 20000).

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/api/builtin.hpp"
#include "core/io/dump.hpp"
#include "core/plan/certificate.hpp"
#include "core/plan/simulate.hpp"
#include "tests/support/catalogues.hpp"

namespace m2n {
namespace {

struct Cluster {
  const char* name;
  testing::Deployment deployment;
};
const std::vector<Cluster> kClusters = {{"two-gpus", {1, 1, 1, 1}},
                                        {"one-node", {4, 2, 4, 4}},
                                        {"nvl72", {32, 8, 32, 8}},
                                        {"16-nodes", {64, 32, 64, 8}},
                                        {"64-nodes", {256, 64, 256, 8}}};
const std::vector<std::pair<const char*, Options>> kPlanners = {
    {"broadcast", {{"chunk_bytes", "1073741824"}}},
    {"direct", {}},
    {"m2n_uniform", {}},
    {"megatron_round_robin", {}},
    {"striped", {}},
    {"balanced", {}},
    {"relay", {{"chunk_bytes", "67108864"}}}};

/// The rows of the study, by column.
struct Columns {
  std::vector<std::string> model, topology, planner, binds, bound_binds;
  std::vector<std::uint64_t> trainers, workers, bytes;
  std::vector<double> seconds, bound_seconds, direct_bound_seconds, ratio, simulated_seconds;

  void write(const std::filesystem::path& file) const {
    DumpWriter writer(file);
    writer.results("planners", {{"model", model},
                                {"topology", topology},
                                {"planner", planner},
                                {"trainers", trainers},
                                {"workers", workers},
                                {"bytes", bytes},
                                {"seconds", seconds},
                                {"bound_seconds", bound_seconds},
                                {"direct_bound_seconds", direct_bound_seconds},
                                {"ratio", ratio},
                                {"simulated_seconds", simulated_seconds},
                                {"binds", binds},
                                {"bound_binds", bound_binds}});
    writer.commit();
  }
};

void study(const char* model, const Catalogue& catalogue, const Cluster& cluster,
           const std::filesystem::path& topologies, std::uint64_t most_messages, Columns& columns) {
  const Registries registries = builtin_registries();
  const Topology topology = Topology::read(topologies / (std::string(cluster.name) + ".json"));
  const Problem problem = testing::sharded_problem(catalogue, cluster.deployment);
  const FlowClasses classes(problem);
  for (const auto& [planner, options] : kPlanners) {
    const Plan plan = registries.planners.create(planner, {options})->plan(problem, topology);
    const Certificate c = certify(plan, problem, topology, classes);
    double simulated = 0;
    if (c.summary.messages <= most_messages) {
      SimulateOptions simulation;
      simulation.discipline = SimulateOptions::Discipline::proportional;
      simulated = simulate(plan, problem, topology, simulation).seconds;
    }
    const std::string simulated_ms = simulated > 0 ? std::to_string(simulated * 1e3) : "-";
    std::fprintf(stderr, "%-12s %-9s %-21s %10.2f ms %8.3f x bound %14s ms  %s\n", model,
                 cluster.name, planner, c.seconds * 1e3, c.ratio, simulated_ms.c_str(),
                 c.binds.c_str());
    std::printf(
        "{\"schema\":1,\"study\":\"planners\",\"model\":\"%s\",\"topology\":\"%s\",\"planner\":"
        "\"%s\",\"trainers\":%d,\"workers\":%d,\"simulated_s\":%.9g,\"certificate\":%s}\n",
        model, cluster.name, planner, cluster.deployment.trainers, cluster.deployment.workers,
        simulated, to_json(c).c_str());
    std::fflush(stdout);
    columns.model.emplace_back(model);
    columns.topology.emplace_back(cluster.name);
    columns.planner.emplace_back(planner);
    columns.trainers.push_back(static_cast<std::uint64_t>(cluster.deployment.trainers));
    columns.workers.push_back(static_cast<std::uint64_t>(cluster.deployment.workers));
    columns.bytes.push_back(c.summary.bytes);
    columns.seconds.push_back(c.seconds);
    columns.bound_seconds.push_back(c.bounds.seconds());
    columns.direct_bound_seconds.push_back(c.bounds.direct_seconds());
    columns.ratio.push_back(c.ratio);
    columns.simulated_seconds.push_back(simulated);
    columns.binds.push_back(c.binds);
    columns.bound_binds.push_back(c.bounds.best().binds);
  }
}

}  // namespace
}  // namespace m2n

int main(int argc, char** argv) {
  using namespace m2n;
  std::filesystem::path topologies = M2N_TOPOLOGIES;
  std::uint64_t most_messages = 20000;
  std::string only;
  std::string dump;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--most-messages=", 0) == 0) {
      most_messages = std::strtoull(argument.c_str() + 16, nullptr, 10);
    } else if (argument.rfind("--topology=", 0) == 0) {
      only = argument.substr(11);
    } else if (argument.rfind("--dump=", 0) == 0) {
      dump = argument.substr(7);
    } else {
      std::fprintf(stderr,
                   "unknown argument '%s'; known are --topology=NAME, "
                   "--dump=FILE and --most-messages=N\n",
                   argv[i]);
      return 2;
    }
  }
  Columns columns;
  for (const auto& [model, catalogue] :
       {std::pair("deepseek-v3", testing::deepseek_v3()), {"qwen3-235b", testing::qwen3_235b()}}) {
    for (const Cluster& cluster : kClusters) {
      if (only.empty() || only == cluster.name) {
        study(model, catalogue, cluster, topologies, most_messages, columns);
      }
    }
  }
  if (!dump.empty()) {
    columns.write(dump);
  }
  return 0;
}
