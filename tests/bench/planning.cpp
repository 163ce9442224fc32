// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// How long planning takes on one core, and how much memory: whole plan with certificate, and one
/// rank's program. JSON lines; times are processor time in milliseconds.

#include <sys/resource.h>

#include <cstdio>
#include <ctime>
#include <string>

#include "core/api/builtin.hpp"
#include "core/plan/certificate.hpp"
#include "tests/support/catalogues.hpp"

namespace m2n {
namespace {

/// Of this process's one thread, so that a busy machine does not count.
double now_ms() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double peak_mib() {
  rusage usage{};
  (void)getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

/// Nodes of eight ranks, a NIC each.
Topology nodes_of_eight(Rank world) {
  Topology topology = Topology::single_island(world, 380, 5);
  topology.islands.clear();
  for (Rank first = 0; first < world; first += 8) {
    topology.islands.emplace_back();
    for (Rank rank = first; rank < std::min<Rank>(first + 8, world); ++rank) {
      topology.islands.back().push_back(rank);
      topology.nics.push_back({{rank}, 48, 50});
    }
  }
  return topology;
}

void measure(const char* name, const Catalogue& catalogue, const testing::Deployment& deployment,
             const std::string& planner_name) {
  const Registries registries = builtin_registries();
  const auto planner = registries.planners.create(planner_name, {});
  const double start = now_ms();
  const Problem problem = testing::sharded_problem(catalogue, deployment);
  const double made = now_ms();
  const Topology topology = nodes_of_eight(problem.world_size());
  const double before = now_ms();
  const Plan plan = planner->plan(problem, topology);
  const double planned = now_ms();
  const Certificate certificate = certify(plan, problem, topology);
  const double certified = now_ms();
  const Plan own = planner->plan_for(problem, topology, 0);
  const double own_planned = now_ms();
  const Program program = make_program(own, problem, 0);
  const double programmed = now_ms();
  std::printf(
      "{\"schema\":1,\"bench\":\"planning\",\"case\":\"%s\",\"planner\":\"%s\",\"parameters\":%zu,"
      "\"ranks\":%d,\"patterns\":%zu,\"regions\":%llu,\"problem_ms\":%.1f,\"plan_ms\":%.1f,"
      "\"certificate_ms\":%.1f,\"plan_and_certificate_ms\":%.1f,\"own_plan_ms\":%.1f,\"program_"
      "ms\":%.1f,"
      "\"sends\":%zu,\"ratio\":%.4f,\"direct_ratio\":%.4f,\"digests_agree\":%s,\"peak_mib\":%.0f}"
      "\n",
      name, planner_name.c_str(), catalogue.size(), problem.world_size(), plan.patterns.size(),
      static_cast<unsigned long long>(certificate.summary.regions), made - start, planned - before,
      certified - planned, certified - before, own_planned - certified, programmed - own_planned,
      program.sends.size(), certificate.ratio, certificate.direct_ratio,
      own.digest == plan.digest ? "true" : "false", peak_mib());
  std::fflush(stdout);
}

}  // namespace
}  // namespace m2n

int main(int argc, char** argv) {
  using namespace m2n::testing;
  const std::string planner = argc > 1 ? argv[1] : "balanced";
  m2n::measure("deepseek-v3 256 -> 128", deepseek_v3(), {256, 64, 128, 8}, planner);
  m2n::measure("deepseek-v3 with 512 experts", deepseek_v3_with_experts(512), {256, 64, 128, 8},
               planner);
  m2n::measure("kimi-k2 1024 -> 512", kimi_k2(), {1024, 128, 512, 8}, planner);
  return 0;
}
