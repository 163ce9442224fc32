// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From an experiment to everything that a command works on, composed by name.

#include <memory>
#include <optional>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/cli/experiment.hpp"
#include "core/engine/engine_options.hpp"
#include "core/engine/local_job.hpp"
#include "core/engine/oracle.hpp"
#include "core/engine/quantising.hpp"
#include "core/io/dump.hpp"
#include "core/plan/relabel.hpp"
#include "core/plan/topology.hpp"

namespace m2n::cli {

/// An experiment, built up to its problem. No weight memory is held yet.
class Job {
 public:
  /// @param ranks  Decides who moves where the experiment does not say.
  explicit Job(const Experiment& experiment, RanksAre ranks = RanksAre::threads);

  const Experiment& experiment() const noexcept { return experiment_; }
  const Registries& registries() const noexcept { return registries_; }
  const Problem& problem() const noexcept { return *problem_; }
  const Topology& topology() const noexcept { return topology_; }
  const std::vector<Resolution>& resolutions() const noexcept { return resolutions_; }
  /// What arrives at the workers: the trainers' values, some of them quantised.
  const TensorValues& values() const noexcept { return *values_; }
  /// Likewise, of round @p version of trainers that change their weights before every round.
  std::unique_ptr<TensorValues> changed_values(std::uint64_t version) const;
  /// Null for a problem file.
  const WorkerModels* models() const noexcept { return models_.get(); }
  /// What --relabel did; nothing when it was not asked for.
  const std::optional<Relabelling>& relabelling() const noexcept { return relabelling_; }
  /// World rank of worker 0 of a model's deployment.
  Rank first_worker() const noexcept { return first_worker_; }

  /// By the experiment's planner, or the plan of the dump that is run again.
  Plan make_plan() const;
  /// Digests of what the ranks of that dump held; none when their values are not known here.
  const std::vector<DumpDigest>& known_digests() const noexcept { return known_digests_; }
  /// Where the weights of a rank live.
  MemoryPlace place_of(Rank rank) const;
  /// The device of a rank, for its transport; nothing where weights live in host memory.
  std::optional<int> device_of(Rank rank) const;
  /// @throws Error{usage} when the transport does not move the memory that the experiment asks for;
  ///         Error{unavailable} when this machine has none of it.
  void require_memory() const;
  /// Sources, sinks and transports of every rank of the world.
  std::vector<LocalRank> make_ranks() const;
  /// @param changes  Its weights change before every round.
  std::unique_ptr<WeightSource> make_source(Rank rank, bool changes = false) const;
  std::unique_ptr<WeightSink> make_sink(Rank rank) const;

 private:
  void build_from_problem();
  void build_from_dump();
  void declare_problem();
  Catalogue declared_catalogue() const;
  std::unique_ptr<Planner> make_planner() const;
  void build_from_model();
  void resolve_models();
  void apply_relabelling();
  std::unique_ptr<TensorValues> make_values(Catalogue made_up);
  void take_values(std::shared_ptr<const TensorValues> trained);

  Experiment experiment_;
  int device_count_ = 0;  ///< With memory on devices.
  Registries registries_;
  Topology topology_;
  std::shared_ptr<const TensorValues> trained_;  ///< As the trainers hold them.
  std::shared_ptr<const TensorValues> values_;
  Quantised quantised_;
  std::shared_ptr<const WorkerModels> models_;
  std::vector<ParamSpec> declared_source_;
  std::vector<Resolution> declared_sink_;
  Rank source_ranks_ = 0;
  Rank first_worker_ = 0;
  std::vector<Resolution> resolutions_;
  std::unique_ptr<const Problem> problem_;
  std::optional<Relabelling> relabelling_;
  std::optional<Plan> replayed_;
  std::vector<DumpDigest> known_digests_;
};

/// Compares a rank's destination with @p values: the live model where there is one, and otherwise
/// the pieces. Nothing is compared on a rank without a sink.
Comparison verify_worker(const Job& job, Rank rank, WeightSink* sink,
                         const std::vector<LocalBuffer>& destination, const TensorValues& values);

}  // namespace m2n::cli
