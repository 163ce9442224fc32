// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The engine of one inference worker: joins the trainers, receives rounds, commits them.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/engine/engine_options.hpp"
#include "core/engine/link.hpp"
#include "core/engine/requests.hpp"

namespace m2n {

/// One worker of a deployment. The four calls of the control plane come to all workers of the
/// deployment alike (see Deployment and WorkerService).
///
/// Order of calls: init(), then start(), update() once or more, finish() a round. After an error of
/// init() or update(), or fail(), init() again, with a larger epoch: the sink stays, and what it
/// resolved, as long as the parameters are the same.
///
/// - Collective: init() and the update() that completes a round, with all ranks of the world.
/// - Threads: one call at a time; version() and fail() from any thread.
/// - Memory: the sink is a loan for the engine's life; its buffers are in use during a round.
/// - Streams: none.
/// - Errors: Error; every rank throws the same text for what is collective. A request that is
///   refused (out of turn, another epoch, version or plan, other names) changes nothing, and the
///   round may go on. After a failure inside a round the sink has rolled back.
class WorkerEngine final {
 public:
  /// @param worker   Number of this worker in its deployment.
  /// @param workers  Of the deployment.
  WorkerEngine(const Registries& registries, EngineOptions options, WeightSink& sink, Rank worker,
               Rank workers);
  WorkerEngine(const WorkerEngine&) = delete;
  WorkerEngine& operator=(const WorkerEngine&) = delete;
  ~WorkerEngine();

  /// Joins the world of @p request, and passes the seven phases. An earlier world is left.
  void init(const InitRequest& request);

  /// A round begins. What an unfinished one wrote is given up.
  void start(const RoundRequest& request);
  /// The next slice of the declared order; the one that completes it receives everything. Weights
  /// are touched only when all ranks are ready. Slices do not move one by one: a wrong name, in
  /// whichever of them, is refused before a byte is written; a plan balances and merges regions
  /// over all parameters, which cuts would undo; and they would save no memory, since direct
  /// parameters land in place and full tensors come in groups as large as RoundLimits says.
  void update(const RoundRequest& request);
  /// Has the caches invalidated, where the options say how, and commits. @return the version.
  std::uint64_t finish(const RoundRequest& request);

  /// Gives up: what was written is rolled back, the other ranks of the world are told.
  void fail(const std::string& reason);
  /// Leaves the world. Committed weights stay.
  void shutdown();

  /// Version of the last commit, as the sink says; nothing while the weights are invalid.
  std::optional<std::uint64_t> version() const;
  const EngineOptions& options() const noexcept { return options_; }
  /// Of the last round; for reports and checks. @pre a round was received.
  const Link& link() const { return *link_; }
  const LinkRound& last_round() const noexcept { return last_round_; }

 private:
  enum class State : std::uint8_t { idle, ready, started, received };

  void refuse_late(const InitRequest& request) const;
  void check(const RoundRequest& request, std::string_view call) const;
  void check_names(const std::vector<std::string>& names) const;
  void check_range(const RoundRequest& request) const;
  void receive(std::uint64_t version);
  void invalidate_caches() const;
  void watch(Deadline deadline);
  void lost(const std::string& why);
  std::vector<Resolution> resolve(const std::shared_ptr<const AgreedParams>& params);
  /// Rolls back. With mutex_ held.
  void give_up(const std::string& reason, bool tell_world = true);
  void drop_link();

  const Registries& registries_;
  EngineOptions options_;
  WeightSink& sink_;
  Rank worker_;
  Rank workers_;

  mutable std::mutex mutex_;  // against the watchdog, fail() and version()
  State state_ = State::idle;
  bool receiving_ = false;  // the update's thread works on the weights
  bool writing_ = false;    // between the sink's begin() and its commit() or roll_back()
  std::string failure_;
  std::uint64_t version_ = 0;  // of the last start()
  std::uint64_t next_version_ = 1;
  std::uint64_t announced_ = 0;  // parameters of the updates of this round
  LinkRound last_round_;
  std::shared_ptr<const AgreedParams> resolved_for_;
  std::vector<Resolution> resolutions_;
  std::unique_ptr<Link> link_;
};

}  // namespace m2n
