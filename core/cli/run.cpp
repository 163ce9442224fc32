// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n run`: one whole experiment in this process.

#include "core/cli/run.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <iostream>
#include <mutex>
#include <optional>
#include <tuple>

#include "core/api/memory.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/dump.hpp"
#include "core/cli/explain.hpp"
#include "core/cli/job.hpp"
#include "core/cli/output.hpp"
#include "core/engine/digests.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"
#include "core/error.hpp"
#include "core/plan/certificate.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

struct Result {
  PlanSummary plan;
  std::string digest;
  double plan_seconds = 0;
  LocalJobReport job;
  std::optional<Comparison> verdict;
  std::vector<DumpDigest> digests;
  /// Of Job::known_digests(): how many this run has as well, and how many are equal.
  std::size_t digests_compared = 0;
  std::size_t digests_equal = 0;

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
                   {"memory", to_string(job.experiment().memory)},
                   {"parameters", result.plan.parameters},
                   {"regions", result.plan.regions},
                   {"rounds", job.experiment().rounds},
                   {"plan_seconds", result.plan_seconds},
                   {"connect_seconds", result.job.connect_seconds},
                   {"prepare_seconds", result.job.prepare_seconds},
                   {"digest", result.digest},
                   {"coverage", coverage_of(job).json()}};
  if (!job.experiment().replay.empty()) {
    out["replay"] = job.experiment().replay.string();
    out["digests_compared"] = result.digests_compared;
    out["digests_equal"] = result.digests_equal;
  }
  if (result.verdict) {
    out["verified_elements"] = result.verdict->elements;
    out["wrong_elements"] = result.verdict->wrong;
  }
  std::cout << json::serialize(out) << '\n';
}

void print_table(const Job& job, const Result& result, const std::string& title) {
  const Experiment& experiment = job.experiment();
  const auto fell_back =
      std::count_if(job.resolutions().begin(), job.resolutions().end(),
                    [](const Resolution& entry) { return entry.mode == Mode::fallback; });
  const std::filesystem::path& file = !experiment.replay.empty() ? experiment.replay
                                      : experiment.file.empty()  ? experiment.problem
                                                                 : experiment.file;
  Table table({title, file.string()}, true);
  table.add({"parameters", std::to_string(result.plan.parameters) + ", of which " +
                               std::to_string(fell_back) + " go through load_weights"});
  table.add({"coverage", coverage_of(job).text()});
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
  table.add({"memory", std::string(to_string(experiment.memory))});
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
  if (!experiment.replay.empty()) {
    table.add({"digests", result.digests_compared == 0
                              ? "not compared: the dump has none of these values"
                              : std::to_string(result.digests_equal) + " of " +
                                    std::to_string(result.digests_compared) +
                                    " equal those of the dump"});
  }
  if (!experiment.dump.empty()) {
    table.add({"dump", experiment.dump.string()});
  }
  table.add({"plan digest", result.digest});
  std::cout << table.text();
}

/// What each rank holds, compared with what it held in the run that was dumped.
void compare_digests(const Job& job, Result& result) {
  std::sort(result.digests.begin(), result.digests.end());
  const auto same_place = [](const DumpDigest& a, const DumpDigest& b) {
    return std::tie(a.side, a.rank, a.parameter) < std::tie(b.side, b.rank, b.parameter);
  };
  for (const DumpDigest& known : job.known_digests()) {
    const auto [first, last] =
        std::equal_range(result.digests.begin(), result.digests.end(), known, same_place);
    if (first != last) {
      ++result.digests_compared;
      result.digests_equal += first->digest == known.digest ? 1 : 0;
    }
  }
}

/// Looks at every rank after the last round: verifies, digests and dumps. Thread-safe.
class Inspection {
 public:
  Inspection(const Job& job, Dump* dump, Result& result)
      : job_(job), dump_(dump), result_(result) {}

  void full_tensor(Rank rank, std::size_t index, const FullTensor& tensor) {
    if (job_.experiment().verify && job_.models() == nullptr) {  // otherwise the live model tells
      add(verify_full(rank, tensor, job_.values()));
    }
    if (dump_ != nullptr) {
      const Box whole = Box::whole(tensor.shape);
      add(Role::destination, rank,
          {{static_cast<std::uint32_t>(index),
            memory_of(tensor.place.space)
                .digest_of_box(tensor.shape, whole, tensor.dtype, tensor.buffer(),
                               row_major(tensor.shape))}});
      if (job_.experiment().dump_shards) {
        dump_->add_full_tensor(rank, index, tensor);
      }
    }
  }

  void rank(const RankView& view) {
    if (job_.experiment().verify) {
      add(verify_worker(job_, view.rank, view.sink, view.buffers->destination, job_.values()));
    }
    if (dump_ != nullptr || !job_.known_digests().empty()) {
      const Problem& problem = job_.problem();
      add(Role::source, view.rank,
          digests_of(problem, Role::source, view.rank, view.buffers->source));
      std::vector<HeldDigest> held =
          digests_of(problem, Role::destination, view.rank, view.buffers->destination);
      std::erase_if(held, [&](const HeldDigest& one) {  // the worker has changed what came
        return job_.resolutions()[one.parameter].rewritten;
      });
      add(Role::destination, view.rank, held);
    }
    if (dump_ != nullptr && job_.experiment().dump_shards) {
      dump_->add_shards(view);
    }
  }

 private:
  void add(const Comparison& verdict) {
    const std::lock_guard lock(mutex_);
    if (!result_.verdict) {
      result_.verdict.emplace();
    }
    result_.verdict->add(verdict);
  }
  void add(Role side, Rank rank, const std::vector<HeldDigest>& held) {
    const std::lock_guard lock(mutex_);
    for (const HeldDigest& one : held) {
      result_.digests.push_back({side, rank, one.parameter, one.digest});
    }
  }

  const Job& job_;
  Dump* dump_;
  Result& result_;
  std::mutex mutex_;
};

}  // namespace

int run_experiment(const Experiment& experiment, const std::string& title) {
  Progress progress(!experiment.json);
  progress.phase("reading");
  const Job job(experiment);
  job.require_memory();

  progress.phase("planning");
  Result result;
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = job.make_plan();
  result.plan_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  progress.phase("checking the plan");
  check_plan(plan, job.problem());
  result.plan = summarize(plan, job.problem());
  result.digest = plan.digest;

  std::optional<Dump> dump;
  if (!experiment.dump.empty()) {
    dump.emplace(job, plan);
    dump->add_facts({{"certificate", to_json(certify(plan, job.problem(), job.topology()))}});
    dump->add_usage(plan);
  }
  Inspection inspection(job, dump ? &*dump : nullptr, result);
  LocalJobOptions options;
  options.rounds = experiment.rounds;
  options.deadline =
      std::chrono::milliseconds(static_cast<std::int64_t>(experiment.deadline_seconds * 1000));
  options.limits.pool_bytes = experiment.pool_bytes;
  progress.phase(coverage_of(job).text());  // before a byte moves
  options.on_phase = [&](std::string_view phase) { progress.phase(phase); };
  options.inspect_full = [&](Rank rank, std::size_t index, const FullTensor& tensor) {
    inspection.full_tensor(rank, index, tensor);
  };
  options.inspect = [&](const RankView& view) { inspection.rank(view); };
  std::vector<LocalRank> ranks = job.make_ranks();
  result.job = run_local_job(job.problem(), plan, job.resolutions(), ranks, options);
  if (experiment.verify && !result.verdict) {
    result.verdict.emplace();  // a world without ranks
  }
  compare_digests(job, result);
  if (dump) {
    progress.phase("dumping");
    dump->add_measurements(result.job, result.digests);
    dump->commit();
  }
  progress.phase("");
  if (experiment.json) {
    print_json(job, result);
  } else {
    print_table(job, result, title);
  }
  if (result.verdict && !result.verdict->ok()) {
    throw Error(Errc::bad_plan, "the weights that arrived are wrong: " + result.verdict->first);
  }
  if (result.digests_equal != result.digests_compared) {
    throw Error(Errc::bad_plan, std::to_string(result.digests_compared - result.digests_equal) +
                                    " of " + std::to_string(result.digests_compared) +
                                    " digests differ from those of '" + experiment.replay.string() +
                                    "'");
  }
  return 0;
}

int run_command(const Arguments& arguments) {
  return run_experiment(parse_experiment(arguments), "m2n run");
}

}  // namespace m2n::cli
