// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/local_job.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "core/engine/elapsed.hpp"
#include "core/engine/first_error.hpp"
#include "core/error.hpp"
#include "core/rendezvous/thread_group.hpp"

namespace m2n {
namespace {

using Clock = std::chrono::steady_clock;

class RankRun {
 public:
  RankRun(const Problem& problem, const Plan& plan, const std::vector<Resolution>& resolutions,
          const LocalJobOptions& options, LocalRank& parts, Group& group, Clock::time_point began)
      : problem_(problem),
        plan_(plan),
        resolutions_(resolutions),
        options_(options),
        parts_(parts),
        group_(group),
        began_(began) {}

  void run() {
    report("connect");
    auto start = Clock::now();
    parts_.transport->connect(group_, deadline());
    connect_seconds = seconds_since(start);

    report("fill");
    PreparedRound round(problem_, plan_, resolutions_, group_.rank(),
                        {parts_.source.get(), parts_.sink.get()}, options_.limits, 1);
    round.require_memory(*parts_.transport);
    group_.barrier("buffers", deadline());

    report("prepare");
    start = Clock::now();
    round.prepare(*parts_.transport, deadline());
    prepare_seconds = seconds_since(start);

    for (std::uint64_t version = 1; version <= options_.rounds; ++version) {
      report("round", version);
      run_round(round, version);
    }
    report("inspect");
    if (options_.inspect) {
      options_.inspect({group_.rank(), &round.buffers(), parts_.sink.get()});
    }
    group_.barrier("end", deadline());
    phases.back().end_seconds = seconds_since(began_);
  }

  double connect_seconds = 0;
  double prepare_seconds = 0;
  std::vector<RoundReport> rounds;
  std::vector<PhaseTime> phases;

 private:
  Deadline deadline() const { return deadline_in(options_.deadline); }

  void report(std::string_view phase, std::uint64_t version = 0) {
    const double now = seconds_since(began_);
    if (!phases.empty()) {
      phases.back().end_seconds = now;
    }
    phases.push_back({std::string(phase), version, now, now});
    if (options_.on_phase) {
      options_.on_phase(phase);
    }
  }

  void run_round(PreparedRound& round, std::uint64_t version) {
    if (parts_.source && version > 1) {
      parts_.source->borrow(version);
    }
    if (parts_.sink) {
      parts_.sink->begin(version);
    }
    group_.barrier("round", deadline());
    try {
      rounds.push_back(round.run(version, options_.deadline, visitor(version)));
      if (parts_.sink) {
        parts_.sink->accept(version);
      }
      group_.barrier("commit", deadline());
      if (parts_.sink) {
        parts_.sink->commit(version);
      }
    } catch (...) {
      round.abort();
      if (parts_.sink) {
        parts_.sink->roll_back();
      }
      throw;
    }
  }

  /// Full tensors of the last round are looked at on their way.
  FullTensorVisitor visitor(std::uint64_t version) const {
    if (!options_.inspect_full || version != options_.rounds) {
      return {};
    }
    return [this](std::size_t index, const FullTensor& tensor) {
      options_.inspect_full(group_.rank(), index, tensor);
    };
  }

  const Problem& problem_;
  const Plan& plan_;
  const std::vector<Resolution>& resolutions_;
  const LocalJobOptions& options_;
  LocalRank& parts_;
  Group& group_;
  Clock::time_point began_;
};

}  // namespace

LocalJobReport run_local_job(const Problem& problem, const Plan& plan,
                             const std::vector<Resolution>& resolutions,
                             std::vector<LocalRank>& ranks, const LocalJobOptions& options) {
  expects(std::cmp_equal(ranks.size(), problem.world_size()), "one entry a rank of the world");
  std::vector<std::unique_ptr<Group>> groups =
      make_thread_groups(std::max<Rank>(1, problem.world_size()));
  std::vector<std::unique_ptr<RankRun>> runs(ranks.size());
  FirstError first_error;
  const auto began = Clock::now();
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        runs[i] = std::make_unique<RankRun>(problem, plan, resolutions, options, ranks[i],
                                            *groups[i], began);
        runs[i]->run();
      } catch (...) {
        first_error.set(std::current_exception());
        groups[i].reset();  // the others learn that this rank has left
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  first_error.rethrow();

  LocalJobReport report;
  report.round_seconds.assign(options.rounds, 0);
  report.rounds.resize(options.rounds);
  for (const auto& run : runs) {
    report.phases.push_back(run->phases);
    report.connect_seconds = std::max(report.connect_seconds, run->connect_seconds);
    report.prepare_seconds = std::max(report.prepare_seconds, run->prepare_seconds);
    for (std::size_t round = 0; round < options.rounds; ++round) {
      report.round_seconds[round] =
          std::max(report.round_seconds[round], run->rounds[round].seconds);
      report.rounds[round].push_back(run->rounds[round]);
    }
  }
  return report;
}

}  // namespace m2n
