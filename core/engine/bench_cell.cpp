// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/bench_cell.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "core/engine/elapsed.hpp"
#include "core/engine/first_error.hpp"
#include "core/engine/start_line.hpp"
#include "core/error.hpp"
#include "core/rendezvous/thread_group.hpp"

namespace m2n {
namespace {

using Clock = std::chrono::steady_clock;

/// What is no part of a transport, noise and checks of ranks that hold more than others, may take
/// long.
constexpr std::chrono::hours kBesides{1};

/// What all ranks of a cell share.
struct CellWorld {
  const std::vector<Program>& programs;
  const WorldBuffers& buffers;
  const std::function<std::unique_ptr<Transport>()>& make;
  const CellOptions& options;
  StartLine line;
  std::atomic<bool> set_up{false};  ///< Every rank is prepared.
};

class CellRank {
 public:
  CellRank(CellWorld& shared, Group& group) : shared_(shared), group_(group) {}

  void run() {
    report("poisoning");
    shared_.buffers.poison(group_.rank(), 2 * shared_.options.seed);
    set_up();
    if (moves_bytes) {
      report("verifying");
      round();
      if (!verify("verified", shared_.options.oracle)) {
        return;
      }
      shared_.buffers.poison(group_.rank(), 2 * shared_.options.seed + 1);
      group_.barrier("poisoned", deadline_in(kBesides));
    }
    report("timing");
    for (std::uint64_t i = 0; i < shared_.options.warm_ups + shared_.options.rounds; ++i) {
      const double time = round();
      if (i >= shared_.options.warm_ups) {
        seconds.push_back(time);
      }
    }
    extra_bytes = session_->extra_bytes();
    if (moves_bytes) {
      report("verifying again");
      verified = verify("verified again", false);
    }
    free_bytes = free_device_bytes();
    group_.barrier("end", deadline());  // sessions of other ranks are measured, too
  }

  void abort() noexcept {
    shared_.line.give_up();
    if (session_) {
      session_->abort();
    }
  }
  /// Before the transport, and in the rank's thread.
  void close() noexcept {
    session_.reset();
    transport_.reset();
  }

  bool moves_bytes = true;
  bool verified = false;
  std::string wrong;  ///< What this rank found.
  double connect_seconds = 0;
  double prepare_seconds = 0;
  std::vector<double> seconds;
  RoundReport last;
  std::optional<std::uint64_t> extra_bytes;
  std::uint64_t free_bytes = 0;

 private:
  Deadline deadline() const { return deadline_in(shared_.options.deadline); }

  void report(std::string_view phase) const {
    if (group_.rank() == 0 && shared_.options.on_phase) {
      shared_.options.on_phase(phase);
    }
  }

  void set_up() {
    const auto rank = static_cast<std::size_t>(group_.rank());
    transport_ = shared_.make();
    moves_bytes = transport_->moves_bytes();
    group_.barrier("made", deadline_in(kBesides));
    report("connecting");
    auto start = Clock::now();
    transport_->connect(group_, deadline());
    connect_seconds = seconds_since(start);
    group_.barrier("connected", deadline());
    report("preparing");
    start = Clock::now();
    session_ =
        transport_->prepare(shared_.programs[rank], shared_.buffers.of(group_.rank()), deadline());
    prepare_seconds = seconds_since(start);
    group_.barrier("prepared", deadline());
    shared_.set_up = true;
  }

  double round() {
    shared_.line.arrive_and_wait(deadline());
    const Deadline end = deadline();
    const auto start = Clock::now();
    session_->start(++version_, end);
    last = session_->wait(end);
    const double measured = seconds_since(start);
    return moves_bytes ? measured : last.seconds;
  }

  /// Collective, so that no rank goes on where another one found something.
  bool verify(std::string_view phase, bool oracle) {
    group_.barrier("moved", deadline());
    wrong = shared_.buffers.check(group_.rank(), oracle);
    const std::vector<std::string> all =
        group_.all_gather(phase, wrong.empty() ? "" : "!", deadline_in(kBesides));
    return std::all_of(all.begin(), all.end(), [](const auto& text) { return text.empty(); });
  }

  std::uint64_t free_device_bytes() const {
    group_.barrier("used", deadline());
    return shared_.buffers.space() == MemorySpace::device
               ? shared_.buffers.memory().free_bytes(shared_.buffers.device_of(group_.rank()))
               : 0;
  }

  CellWorld& shared_;
  Group& group_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Session> session_;
  std::uint64_t version_ = 0;
};

/// Turns what went wrong into a status and a sentence.
void judge_cell(const std::exception_ptr& error, bool set_up, CellReport& report) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    const bool refusal =
        !set_up && known.code() != Errc::peer_lost && known.code() != Errc::timed_out;
    report.status = refusal ? CellStatus::refused : CellStatus::failed;
    report.reason = known.what();
  } catch (const std::exception& other) {
    report.status = CellStatus::failed;
    report.reason = other.what();
  }
}

void add_figures(const std::vector<std::unique_ptr<CellRank>>& ranks, const CellOptions& options,
                 CellReport& report) {
  report.round_seconds.assign(options.rounds, 0);
  for (const auto& rank : ranks) {
    report.rank_seconds.push_back(rank->seconds);
    for (std::size_t round = 0; round < rank->seconds.size(); ++round) {
      report.round_seconds[round] = std::max(report.round_seconds[round], rank->seconds[round]);
    }
    for (const PeerTraffic& peer : rank->last.peers) {
      report.sent_bytes += peer.sent_bytes;
      if (std::find(report.paths.begin(), report.paths.end(), peer.path) == report.paths.end()) {
        report.paths.push_back(peer.path);
      }
    }
    if (rank->extra_bytes) {
      report.extra_bytes = std::max(report.extra_bytes.value_or(0), *rank->extra_bytes);
    }
  }
}

}  // namespace

std::string_view to_string(CellStatus status) {
  switch (status) {
    case CellStatus::ok:
      return "ok";
    case CellStatus::refused:
      return "refused";
    case CellStatus::failed:
      return "failed";
    case CellStatus::wrong:
      return "wrong";
  }
  return "?";
}

CellReport run_cell(const std::vector<Program>& programs, const WorldBuffers& buffers,
                    const std::function<std::unique_ptr<Transport>()>& make,
                    const CellOptions& options) {
  const auto world = static_cast<Rank>(programs.size());
  expects(world > 0, "a program a rank");
  std::map<int, std::uint64_t> free_before;
  if (buffers.space() == MemorySpace::device) {
    for (Rank rank = 0; rank < world; ++rank) {
      const int device = buffers.device_of(rank);
      free_before.try_emplace(device, buffers.memory().free_bytes(device));
    }
  }
  CellWorld shared{programs, buffers, make, options, StartLine(world)};
  std::vector<std::unique_ptr<Group>> groups = make_thread_groups(world);
  std::vector<std::unique_ptr<CellRank>> ranks;
  for (const auto& group : groups) {
    ranks.push_back(std::make_unique<CellRank>(shared, *group));
  }
  FirstError first_error;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        ranks[i]->run();
      } catch (...) {
        first_error.set(std::current_exception());
        ranks[i]->abort();
      }
      ranks[i]->close();
      groups[i].reset();  // after an error the others learn that this rank has left
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }

  CellReport report;
  for (const auto& rank : ranks) {
    report.moves_bytes = report.moves_bytes && rank->moves_bytes;
    report.connect_seconds = std::max(report.connect_seconds, rank->connect_seconds);
    report.prepare_seconds = std::max(report.prepare_seconds, rank->prepare_seconds);
  }
  if (first_error.get()) {
    judge_cell(first_error.get(), shared.set_up, report);
    return report;
  }
  const auto liar = std::find_if(ranks.begin(), ranks.end(),
                                 [](const auto& rank) { return !rank->wrong.empty(); });
  if (liar != ranks.end()) {
    report.status = CellStatus::wrong;
    report.reason = (*liar)->wrong;
    return report;
  }
  report.verified = ranks.front()->verified;
  add_figures(ranks, options, report);
  for (Rank rank = 0; rank < world; ++rank) {
    const auto before = free_before.find(buffers.device_of(rank));
    if (before != free_before.end()) {
      const std::uint64_t after = ranks[static_cast<std::size_t>(rank)]->free_bytes;
      const std::uint64_t taken = before->second - std::min(before->second, after);
      report.taken_bytes = std::max(report.taken_bytes.value_or(0), taken);
    }
  }
  return report;
}

}  // namespace m2n
