// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n bench`: planners x transports x workloads, side by side in one process.

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "core/api/builtin.hpp"
#include "core/cli/bench_limit.hpp"
#include "core/cli/bench_options.hpp"
#include "core/cli/bench_report.hpp"
#include "core/cli/bench_workloads.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/job.hpp"
#include "core/cli/output.hpp"
#include "core/engine/elapsed.hpp"
#include "core/engine/first_error.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Runs @p body once a rank, each in a thread.
template <class Body>
void in_ranks(Rank world, const Body& body) {
  FirstError error;
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        error.set(std::current_exception());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  error.rethrow();
}

/// The plan of a workload by one planner, and every rank's part of it.
struct Planned {
  std::vector<Program> programs;
  PlanSummary summary;
  double seconds = 0;
};

Planned plan_by(const Planner& planner, const Problem& problem, const Topology& topology) {
  Planned out;
  auto start = Clock::now();
  const Plan plan = planner.plan(problem, topology);
  out.seconds = seconds_since(start);
  check_plan(plan, problem);
  double slowest = 0;
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    start = Clock::now();
    out.programs.push_back(make_program(plan, problem, rank));
    slowest = std::max(slowest, seconds_since(start));
  }
  out.seconds += slowest;
  out.summary = summarize(plan, problem);
  return out;
}

/// 'all' becomes every registered name.
template <class Registry>
void expand_all(std::vector<PluginSpec>& specs, const Registry& registry) {
  std::vector<PluginSpec> out;
  for (PluginSpec& spec : specs) {
    if (spec.name != "all") {
      out.push_back(std::move(spec));
      continue;
    }
    for (const auto& entry : registry.entries()) {
      out.push_back({entry.first, entry.first, spec.options});
    }
  }
  specs = std::move(out);
}

/// Unknown names and settings end the command before anything is measured; what is known and does
/// not work here is a matter of its cells.
template <class Registry, class Context>
void require_known(const std::vector<PluginSpec>& specs, const Registry& registry,
                   const Context& context_of) {
  for (const PluginSpec& spec : specs) {
    try {
      registry.create(spec.name, context_of(spec));
    } catch (const Error& error) {
      if (error.code() == Errc::usage) {
        throw;
      }
    }
  }
}

class Bench {
 public:
  explicit Bench(BenchOptions options)
      : options_(std::move(options)), registries_(builtin_registries()), progress_(true) {
    for (const std::filesystem::path& file : options_.experiment.plugins) {
      load_plugin(file, registries_);
    }
    expand_all(options_.planners, registries_.planners);
    expand_all(options_.transports, registries_.transports);
    require_known(options_.planners, registries_.planners,
                  [](const PluginSpec& spec) { return PlannerContext{spec.options}; });
    require_known(options_.transports, registries_.transports, [](const PluginSpec& spec) {
      return TransportContext{spec.options, {}};
    });
    if (!options_.experiment.topology.empty()) {
      topology_ = Topology::read(options_.experiment.topology);
    }
    if (options_.own_workload) {
      job_.emplace(shared_experiment());
    }
  }

  int run() {
    progress_.phase("measuring the limit");
    const Rank world = job_ ? job_->problem().world_size() : first_worker() + options_.workers;
    limit_ = measure_limit(options_.memory, world, options_.limit_bytes);
    BenchReport report(options_, limit_, machine());
    report_ = &report;
    if (job_) {
      const std::filesystem::path& file =
          options_.experiment.file.empty() ? options_.experiment.problem : options_.experiment.file;
      run_workload(file.empty() ? "model" : file.stem().string(), {}, job_->problem());
    }
    for (const std::string& name : options_.workloads) {
      run_named(name);
    }
    progress_.phase("measuring the limit again");
    report.finish(measure_limit(options_.memory, world, options_.limit_bytes));
    return verdict();
  }

 private:
  /// For the problem alone: who plans and moves is another axis.
  Experiment shared_experiment() const {
    Experiment out = options_.experiment;
    out.planner = "direct";
    out.planner_options.clear();
    out.transport = "loopback";
    out.transport_options.clear();
    return out;
  }

  std::string machine() const {
    const Memory& memory = memory_of(options_.memory);
    return options_.memory == MemorySpace::host
               ? memory.description(0)
               : std::to_string(memory.device_count()) + " x " + memory.description(0);
  }

  Rank first_worker() const { return options_.colocated ? 0 : options_.trainers; }

  bool fits(const Problem& problem) const {
    const Memory& memory = memory_of(options_.memory);
    const auto needed = needed_bytes(problem, memory.device_count());
    return std::all_of(needed.begin(), needed.end(), [&](const auto& entry) {
      const std::uint64_t free = memory.free_bytes(entry.first);
      return entry.second <= free - free / 10;
    });
  }

  void run_named(const std::string& name) {
    progress_.phase(name + ": laying out");
    Workload workload;
    try {
      workload = make_workload(
          name, {registries_, options_.trainers, first_worker(), options_.workers, options_.scale,
                 [&](const Problem& problem) { return fits(problem); }});
    } catch (const Error& error) {
      BenchRow row;
      row.workload = name;
      row.trainers = options_.trainers;
      row.workers = options_.workers;
      refuse_all(row, error);
      return;
    }
    run_workload(name, workload.scaled, *workload.problem);
  }

  void run_workload(const std::string& name, const std::string& scaled, const Problem& problem) {
    BenchRow row;
    row.workload = name;
    row.scaled = scaled;
    row.trainers = static_cast<Rank>(problem.source_ranks().size());
    row.workers = static_cast<Rank>(problem.destination_ranks().size());
    row.payload_bytes = payload_bytes(problem);
    std::unique_ptr<const TensorValues> values;
    std::optional<WorldBuffers> buffers;
    try {
      row.limit_seconds = limit_seconds(problem, options_.memory, limit_);
      values = values_of(problem);
      buffers.emplace(problem, *values, options_.memory, options_.order);
      progress_.phase(name + ": filling");
      in_ranks(problem.world_size(), [&](Rank rank) { buffers->fill(rank); });
      in_ranks(problem.world_size(), [&](Rank rank) { buffers->expect(rank); });
    } catch (const Error& error) {
      refuse_all(row, error);
      return;
    }
    for (const PluginSpec& planner : options_.planners) {
      row.planner = planner.text;
      progress_.phase(name + ", " + planner.text + ": planning");
      Planned planned;
      try {
        planned = plan_by(*registries_.planners.create(planner.name, {planner.options}), problem,
                          topology_for(problem));
      } catch (const Error& error) {
        row.plan.reset();
        for (const PluginSpec& transport : options_.transports) {
          refuse(row, transport, error);
        }
        continue;
      }
      row.plan = planned.summary;
      row.plan_seconds = planned.seconds;
      for (const PluginSpec& transport : options_.transports) {
        row.transport = transport.text;
        row.cell = run_cell(
            planned.programs, *buffers,
            [&] {
              return registries_.transports.create(transport.name, {transport.options, {}});
            },
            cell_options(row));
        report_->add(row);
      }
    }
  }

  CellOptions cell_options(const BenchRow& row) {
    CellOptions out;
    out.warm_ups = options_.warm_ups;
    out.rounds = options_.rounds;
    out.deadline = std::chrono::milliseconds(
        static_cast<std::int64_t>(options_.experiment.deadline_seconds * 1000));
    out.oracle = options_.experiment.verify;
    out.seed = report_->rows().size() + 1;
    const std::string title = row.workload + ", " + row.planner + ", " + row.transport + ": ";
    out.on_phase = [this, title](std::string_view phase) {
      progress_.phase(title + std::string(phase));
    };
    return out;
  }

  std::unique_ptr<const TensorValues> values_of(const Problem& problem) const {
    Catalogue catalogue;
    for (const Parameter& parameter : problem.parameters()) {
      catalogue.push_back({parameter.name, parameter.source_dtype(), parameter.shape});
    }
    std::unique_ptr<const TensorValues> trained =
        registries_.values.create("synthetic", {{}, std::move(catalogue)});
    Quantised quantised;
    for (const Parameter& parameter : problem.parameters()) {
      if (parameter.quantise) {
        quantised.emplace(parameter.name, *parameter.quantise);
      }
    }
    return quantised.empty() ? std::move(trained)
                             : make_quantised_values(std::move(trained), quantised);
  }

  Topology topology_for(const Problem& problem) const {
    Topology out = topology_ ? *topology_ : Topology::single_island(problem.world_size());
    out.require(problem.world_size());
    return out;
  }

  /// A row of every cell, with one reason.
  void refuse_all(BenchRow row, const Error& error) {
    for (const PluginSpec& planner : options_.planners) {
      row.planner = planner.text;
      for (const PluginSpec& transport : options_.transports) {
        refuse(row, transport, error);
      }
    }
  }

  void refuse(BenchRow row, const PluginSpec& transport, const Error& error) {
    row.transport = transport.text;
    row.cell = {};
    row.cell.status = CellStatus::refused;
    row.cell.reason = error.what();
    report_->add(std::move(row));
  }

  int verdict() const {
    const auto bad = [](const BenchRow& row) {
      return row.cell.status == CellStatus::wrong || row.cell.status == CellStatus::failed;
    };
    const auto& rows = report_->rows();
    const auto first = std::find_if(rows.begin(), rows.end(), bad);
    if (first == rows.end()) {
      return 0;
    }
    throw Error(Errc::bad_plan, std::to_string(std::count_if(rows.begin(), rows.end(), bad)) +
                                    " of " + std::to_string(rows.size()) +
                                    " cells are wrong or failed, first " + first->workload +
                                    " by planner '" + first->planner + "' over transport '" +
                                    first->transport + "': " + first->cell.reason);
  }

  BenchOptions options_;
  Registries registries_;
  Progress progress_;
  std::optional<Topology> topology_;
  std::optional<Job> job_;
  Limit limit_;
  BenchReport* report_ = nullptr;
};

}  // namespace

int bench_command(const Arguments& arguments) { return Bench(parse_bench(arguments)).run(); }

}  // namespace m2n::cli
