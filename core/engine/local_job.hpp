// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A whole job in this process: every rank a thread, with its source, its sink or both.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/sink.hpp"
#include "core/api/source.hpp"
#include "core/api/transport.hpp"
#include "core/engine/round.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

/// One rank's parts. A rank may be a trainer, a worker, both, or neither (then it only takes part
/// in the transport).
struct LocalRank {
  std::unique_ptr<WeightSource> source;
  std::unique_ptr<WeightSink> sink;
  std::unique_ptr<Transport> transport;
};

/// What a rank is asked to look at after the rounds, with its weights still in place.
struct RankView {
  Rank rank = 0;
  const Buffers* buffers = nullptr;
  WeightSink* sink = nullptr;  ///< Null on a rank that is no worker.
};

struct LocalJobOptions {
  std::uint64_t rounds = 1;
  std::chrono::milliseconds deadline{60'000};  ///< Of each phase.
  /// Called in a rank's thread when it enters @p phase; for progress. May be empty.
  std::function<void(std::string_view phase)> on_phase;
  /// Called in every rank's thread after the last round. May be empty.
  std::function<void(const RankView&)> inspect;
  /// Called in a worker's thread with each full tensor of parameter @p index in the last round. May
  /// be empty.
  std::function<void(Rank rank, std::size_t index, const FullTensor& tensor)> inspect_full;
  RoundLimits limits;
};

/// How long one rank was in one phase, in seconds from the start of the job.
struct PhaseTime {
  std::string phase;
  std::uint64_t version = 0;  ///< Of a round; 0 outside of rounds.
  double start_seconds = 0;
  double end_seconds = 0;
};

/// Times of the slowest rank, phase by phase, and each rank's rounds.
struct LocalJobReport {
  double connect_seconds = 0;
  double prepare_seconds = 0;
  std::vector<double> round_seconds;             ///< [round]
  std::vector<std::vector<RoundReport>> rounds;  ///< [round][rank]
  std::vector<std::vector<PhaseTime>> phases;    ///< [rank], in order
};

/// Runs rounds of @p plan. @p ranks has one entry a rank of the problem's world, @p resolutions one
/// a parameter. The world's threads end before this returns.
/// @throws the first rank's error; every other rank is aborted.
LocalJobReport run_local_job(const Problem& problem, const Plan& plan,
                             const std::vector<Resolution>& resolutions,
                             std::vector<LocalRank>& ranks, const LocalJobOptions& options);

}  // namespace m2n
