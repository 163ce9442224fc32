// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank's place in one world of trainers and workers: what both engines share.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/engine/agreed.hpp"
#include "core/engine/engine_options.hpp"
#include "core/engine/integrity.hpp"
#include "core/engine/requests.hpp"
#include "core/engine/round.hpp"
#include "core/engine/watchdog.hpp"
#include "core/plan/plan.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n {

/// What a rank brings. Loans for the lifetime of the link; one of source and sink is null.
struct LinkParts {
  const Registries* registries = nullptr;
  const EngineOptions* options = nullptr;
  WeightSource* source = nullptr;
  WeightSink* sink = nullptr;
  std::uint64_t first_version = 1;  ///< That this rank could be next.
  /// Of a worker: what it was told that comes, a loan during Link::init(), and what its sink makes
  /// of what was agreed on.
  const std::vector<ParamSpec>* told = nullptr;
  std::function<std::vector<Resolution>(const std::shared_ptr<const AgreedParams>&)> resolve;
};

/// What one rank measured in one round.
struct LinkRound {
  RoundReport report;
  double borrow_seconds = 0;     ///< Until the source had lent its weights; 0 for workers.
  double start_seconds = 0;      ///< Until all ranks had agreed to begin.
  double integrity_seconds = 0;  ///< Digests and their comparison; 0 without them.
};

/// Order of calls: init(), then round() any number of times. After an error only failure() and the
/// destructor.
///
/// - Collective: init() and round(), by every rank of the world.
/// - Threads: one at a time; abort() from any.
/// - Memory: borrows the source's and sink's buffers until it is destroyed.
/// - Errors: every rank throws the same text, which names the phase and every rank at fault.
class Link final {
 public:
  Link(LinkParts parts, WorldSpec world, Rank rank);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  /// The seven phases. @param early  An error of this rank from before, which the source agreement
  /// tells to all.
  void init(const std::string& early = {});

  /// Moves version @p version, and compares digests. A sink's begin() is called once all agreed to
  /// begin, right after @p before_writing, which may be empty.
  LinkRound round(std::uint64_t version, const std::function<void()>& before_writing = {});

  /// Ends the world for all ranks. Nothing to do when a phase has ended it.
  void abort(const std::string& reason) noexcept;
  /// Closes this rank's connection, when the world is known to have ended.
  void hang_up() noexcept;
  /// What the phase threw that ended this link, on every rank alike; empty while none has.
  const std::string& ended() const noexcept { return ended_; }
  /// Why the world has ended; empty while it has not.
  std::string failure() const;
  /// The same after abort(), which takes a moment.
  std::string settled_failure() const;

  Rank rank() const noexcept { return rank_; }
  const WorldSpec& world() const noexcept { return world_; }
  const std::vector<ParamSpec>& params() const noexcept { return declared_->params; }
  /// Of params(); see InitRequest::source_digest.
  const std::string& source_digest() const noexcept { return declared_->digest; }
  const std::string& plan_digest() const noexcept { return plan_digest_; }
  const Problem& problem() const noexcept { return agreed_->problem; }
  const Buffers& buffers() const { return round_->buffers(); }
  const std::vector<Resolution>& resolutions() const noexcept { return *resolutions_; }
  /// Longest that a round may take to move, all groups together.
  std::chrono::milliseconds move_span() const noexcept { return move_span_; }
  WorldGroup& group() noexcept { return *group_; }
  std::uint64_t epoch() const noexcept { return group_->epoch(); }
  /// After init(): the version of the first round, the same on every rank.
  std::uint64_t first_version() const noexcept { return parts_.first_version; }
  Watchdog& watchdog() noexcept { return watchdog_; }
  bool verifies() const noexcept { return integrity_ != nullptr; }

  /// Runs @p body as one phase: the hook, the event, and every error of it made that of all ranks.
  void phase(std::string_view name, std::optional<std::uint64_t> version,
             const std::function<void()>& body);
  /// Tells an event of this rank.
  void tell(Event::Level level, std::string_view phase, std::optional<std::uint64_t> version,
            double seconds, std::string detail = {}) const;

 private:
  const EngineOptions& options() const noexcept { return *parts_.options; }
  /// What @p body gives, or its error, as this rank's statement.
  static Statement attempt(const std::function<std::string()>& body);

  void meet();
  void agree_on_source(const std::string& early);
  void agree_on_destination();
  void agree_on_data_plane();
  void agree_on_version(Deadline deadline);
  void prepare_runtime();
  void connect();
  void complete_plan();
  void compare_bodies(std::string_view phase, Rank root, const std::string& text, bool mine);
  AgreedPlan make_plan() const;
  void move(std::uint64_t version, const std::function<void()>& before_writing, LinkRound& round);
  void check_integrity(std::uint64_t version, LinkRound& round);
  std::string judge_totals(const Statement& mine, Deadline deadline);
  std::string judge_digests(Deadline deadline);
  void measure_direct();

  LinkParts parts_;
  WorldSpec world_;
  Rank rank_;
  std::string part_;
  std::string ended_;

  mutable std::mutex hanging_up_;  // group_, round_ and ended_ against failure() and abort()
  std::unique_ptr<WorldGroup> group_;
  std::shared_ptr<const AgreedParams> declared_;
  std::string resolved_digest_;
  std::shared_ptr<const std::vector<Resolution>> resolutions_;
  std::shared_ptr<const AgreedPlan> agreed_;
  std::string plan_digest_;
  std::chrono::milliseconds move_span_{0};
  std::unique_ptr<Integrity> integrity_;
  Integrity::Measurement measurement_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<PreparedRound> round_;
  Watchdog watchdog_;
};

}  // namespace m2n
