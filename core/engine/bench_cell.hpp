// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One cell of a comparison: a plan on a transport over given buffers, verified and then timed.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/transport.hpp"
#include "core/engine/world_buffers.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

struct CellOptions {
  std::uint64_t warm_ups = 2;
  std::uint64_t rounds = 10;
  std::chrono::milliseconds deadline{60'000};  ///< Of each phase and round.
  bool oracle = true;                          ///< See WorldBuffers::check().
  std::uint64_t seed = 0;  ///< Of the noise in the destinations; another one a cell.
  /// Called by rank 0 when it enters @p phase. May be empty.
  std::function<void(std::string_view phase)> on_phase = {};
};

/// How a cell ended.
enum class CellStatus : std::uint8_t {
  ok,
  refused,  ///< The transport cannot do this, and said so before a round.
  failed,   ///< A round, or setting up, broke or took too long.
  wrong,    ///< Bytes arrived that are not those of the source. Nothing was timed, or it is void.
};
std::string_view to_string(CellStatus status);

/// What a cell showed. Figures of phases that were not reached are 0 and empty.
struct CellReport {
  CellStatus status = CellStatus::ok;
  std::string reason;          ///< One sentence, unless ok.
  bool moves_bytes = true;     ///< See Transport; otherwise nothing is verified.
  bool verified = false;       ///< Before the timed rounds and after them.
  double connect_seconds = 0;  ///< Of the slowest rank.
  double prepare_seconds = 0;
  std::vector<double> round_seconds;  ///< [round] of the slowest rank, warm-ups left out.
  std::vector<std::vector<double>> rank_seconds;  ///< [rank][round]
  std::uint64_t sent_bytes = 0;    ///< By all ranks in a round, as the transport reports it.
  std::vector<std::string> paths;  ///< How, without repeats, in order of peers.
  std::optional<std::uint64_t> extra_bytes;  ///< Session::extra_bytes() of the rank with most.
  /// Free device memory before connect() less that after the last round, of the device that lost
  /// most; nothing in host memory.
  std::optional<std::uint64_t> taken_bytes;
};

/// Runs @p programs, one a rank of the world, over @p buffers, which are filled and expect() what
/// their sources hold: spoils the destinations; connects and prepares; one round; checks every
/// rank; spoils them again; warm-ups, timed rounds, and checks again. Ranks are threads, which end
/// before this returns. A rank's time of a round is from its call of start() until wait() returns,
/// or what the transport reports where no bytes move.
/// @param make  A transport of each rank.
CellReport run_cell(const std::vector<Program>& programs, const WorldBuffers& buffers,
                    const std::function<std::unique_ptr<Transport>()>& make,
                    const CellOptions& options);

}  // namespace m2n
