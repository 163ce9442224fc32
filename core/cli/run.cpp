// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n run`: one whole experiment in this process.

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <iostream>
#include <mutex>
#include <optional>

#include "core/cli/commands.hpp"
#include "core/cli/dump.hpp"
#include "core/cli/job.hpp"
#include "core/cli/output.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Compares a rank's destination with the oracle: the live model where there is one, and otherwise
/// the pieces.
Comparison verify_rank(const Job& job, const RankView& view) {
  if (view.sink == nullptr) {
    return {};
  }
  if (job.models() != nullptr) {
    if (const auto live = view.sink->live(); !live.empty()) {
      const auto worker = static_cast<std::size_t>(view.rank - job.first_worker());
      return verify_model((*job.models())[worker], view.rank, live, job.values());
    }
  }
  return verify_pieces(job.problem(), view.rank, view.buffers->destination, job.values(),
                       job.resolutions());
}

struct Result {
  PlanSummary plan;
  std::string digest;
  double plan_seconds = 0;
  LocalJobReport job;
  std::optional<Comparison> verdict;

  double seconds() const { return median(job.round_seconds); }
  double gb_per_s() const {
    return seconds() > 0 ? static_cast<double>(plan.bytes + plan.local_bytes) / (seconds() * 1e9)
                         : 0;
  }
  bool verified() const { return verdict && verdict->ok(); }
};

void print_json(const Job& job, const Result& result) {
  json::object out{{"verified", result.verified()},
                   {"bytes", result.plan.bytes},
                   {"local_bytes", result.plan.local_bytes},
                   {"seconds", result.seconds()},
                   {"gb_per_s", result.gb_per_s()},
                   {"planner", job.experiment().planner},
                   {"transport", job.experiment().transport},
                   {"parameters", result.plan.parameters},
                   {"regions", result.plan.regions},
                   {"rounds", job.experiment().rounds},
                   {"plan_seconds", result.plan_seconds},
                   {"connect_seconds", result.job.connect_seconds},
                   {"prepare_seconds", result.job.prepare_seconds},
                   {"digest", result.digest}};
  if (result.verdict) {
    out["verified_elements"] = result.verdict->elements;
    out["wrong_elements"] = result.verdict->wrong;
  }
  std::cout << json::serialize(out) << '\n';
}

void print_table(const Job& job, const Result& result) {
  const Experiment& experiment = job.experiment();
  const auto fell_back =
      std::count_if(job.resolutions().begin(), job.resolutions().end(),
                    [](const Resolution& entry) { return entry.mode == Mode::fallback; });
  const std::filesystem::path& file =
      experiment.file.empty() ? experiment.problem : experiment.file;
  Table table({"m2n run", file.string()}, true);
  table.add({"parameters", std::to_string(result.plan.parameters) + ", of which " +
                               std::to_string(fell_back) + " go through load_weights"});
  table.add({"from", std::to_string(job.problem().source_ranks().size()) + " trainer ranks (" +
                         (experiment.problem.empty() ? experiment.source_kind : "declared") + ")"});
  table.add({"to", std::to_string(job.problem().destination_ranks().size()) + " workers (" +
                       experiment.sink_kind + ")"});
  table.add({"planner", experiment.planner + ": " + std::to_string(result.plan.regions) +
                            " regions, " + std::to_string(result.plan.messages) + " messages, in " +
                            human_seconds(result.plan_seconds)});
  table.add({"transport", experiment.transport + ": connected in " +
                              human_seconds(result.job.connect_seconds) + ", prepared in " +
                              human_seconds(result.job.prepare_seconds)});
  table.add({"moved", human_bytes(result.plan.bytes) + " between ranks, " +
                          human_bytes(result.plan.local_bytes) + " inside"});
  table.add({"round", human_seconds(result.seconds()) + " (median of " +
                          std::to_string(experiment.rounds) + "), " + fixed(result.gb_per_s(), 2) +
                          " GB/s"});
  if (result.verdict) {
    table.add(
        {"verified",
         result.verified()
             ? std::to_string(result.verdict->elements) + " destination elements equal the oracle's"
             : "NO: " + std::to_string(result.verdict->wrong) + " of " +
                   std::to_string(result.verdict->elements) + " elements are wrong"});
  } else {
    table.add({"verified", "not asked for"});
  }
  if (!experiment.dump.empty()) {
    table.add({"dump", experiment.dump.string()});
  }
  table.add({"plan digest", result.digest});
  std::cout << table.text();
}

}  // namespace

int run_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  Progress progress(!experiment.json);
  progress.phase("reading");
  const Job job(experiment);

  progress.phase("planning");
  Result result;
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = job.make_planner()->plan(job.problem(), job.topology());
  result.plan_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  progress.phase("checking the plan");
  check_plan(plan, job.problem());
  result.plan = summarize(plan, job.problem());
  result.digest = plan.digest;

  std::optional<Dump> dump;
  if (!experiment.dump.empty()) {
    dump.emplace(job, plan);
  }
  std::mutex verdict_mutex;
  LocalJobOptions options;
  options.rounds = experiment.rounds;
  options.deadline =
      std::chrono::milliseconds(static_cast<std::int64_t>(experiment.deadline_seconds * 1000));
  options.limits.pool_bytes = experiment.pool_bytes;
  options.on_phase = [&](std::string_view phase) { progress.phase(phase); };
  const auto add_verdict = [&](const Comparison& verdict) {
    const std::lock_guard lock(verdict_mutex);
    if (!result.verdict) {
      result.verdict.emplace();
    }
    result.verdict->add(verdict);
  };
  options.inspect_full = [&](Rank rank, std::size_t index, const FullTensor& tensor) {
    if (experiment.verify && job.models() == nullptr) {  // otherwise the live model tells
      add_verdict(verify_full(rank, tensor, job.values()));
    }
    if (dump && experiment.dump_shards) {
      dump->add_full_tensor(rank, index, tensor);
    }
  };
  options.inspect = [&](const RankView& view) {
    if (experiment.verify) {
      add_verdict(verify_rank(job, view));
    }
    if (dump && experiment.dump_shards) {
      dump->add_shards(view);
    }
  };
  std::vector<LocalRank> ranks = job.make_ranks();
  result.job = run_local_job(job.problem(), plan, job.resolutions(), ranks, options);
  if (experiment.verify && !result.verdict) {
    result.verdict.emplace();  // a world without ranks
  }
  if (dump) {
    progress.phase("dumping");
    dump->add_rounds(result.job);
    dump->commit();
  }
  progress.phase("");
  if (experiment.json) {
    print_json(job, result);
  } else {
    print_table(job, result);
  }
  if (result.verdict && !result.verdict->ok()) {
    throw Error(Errc::bad_plan, "the weights that arrived are wrong: " + result.verdict->first);
  }
  return 0;
}

}  // namespace m2n::cli
