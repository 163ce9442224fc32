// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/planned_job.hpp"

#include <boost/json.hpp>
#include <chrono>

namespace m2n::cli {
namespace {

namespace json = boost::json;

json::object relabel_json(const RelabelBytes& bytes) {
  return {{"local_bytes", bytes.local}, {"island_bytes", bytes.island}, {"far_bytes", bytes.far}};
}

}  // namespace

PlannedJob::PlannedJob(const Job& planned_job) : job(planned_job) {
  const auto start = std::chrono::steady_clock::now();
  plan = job.make_plan();
  plan_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  check_plan(plan, job.problem());
  certificate = certify(plan, job.problem(), job.topology());
}

json::object PlannedJob::json() const {
  const PlanSummary& summary = certificate.summary;
  json::object out{{"planner", plan.planner},
                   {"parameters", summary.parameters},
                   {"patterns", summary.patterns},
                   {"regions", summary.regions},
                   {"messages", summary.messages},
                   {"stages", summary.stages},
                   {"bytes", summary.bytes},
                   {"local_bytes", summary.local_bytes},
                   {"scratch_bytes", summary.scratch_bytes},
                   {"max_egress_bytes", summary.max_egress_bytes()},
                   {"max_ingress_bytes", summary.max_ingress_bytes()},
                   {"plan_seconds", plan_seconds},
                   {"digest", plan.digest},
                   {"certificate", json::parse(to_json(certificate))}};
  if (const auto& relabelling = job.relabelling()) {
    out["relabel"] = {{"ranks", json::value_from(relabelling->ranks)},
                      {"before", relabel_json(relabelling->before)},
                      {"after", relabel_json(relabelling->after)}};
  }
  return out;
}

Table PlannedJob::table() const {
  const PlanSummary& summary = certificate.summary;
  Table table({"planner", plan.planner}, true);
  table.add({"parameters", std::to_string(summary.parameters) + " in " +
                               std::to_string(summary.patterns) + " patterns"});
  table.add({"from", std::to_string(job.problem().source_ranks().size()) + " trainer ranks"});
  table.add({"to", std::to_string(job.problem().destination_ranks().size()) + " workers"});
  table.add({"planned in", human_seconds(plan_seconds)});
  table.add({"digest", plan.digest});
  if (const auto& relabelling = job.relabelling()) {
    const RelabelBytes& before = relabelling->before;
    const RelabelBytes& after = relabelling->after;
    table.add({"relabelled", human_bytes(after.far) + " between islands instead of " +
                                 human_bytes(before.far) + ", " + human_bytes(after.local) +
                                 " on the spot instead of " + human_bytes(before.local)});
  }
  return table;
}

}  // namespace m2n::cli
