// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the ranks of a session share when they are threads of one process: the work, how far
/// everyone is, and when the bytes of each pair moved.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/api/group.hpp"
#include "core/error.hpp"
#include "core/tensor/copy.hpp"
#include "transports/common/rank_memory.hpp"
#include "transports/loopback/world.hpp"

namespace m2n::loopback {

/// When the bytes of a pair of ranks moved, whoever moved them.
class PairTimes {
 public:
  void begin() noexcept {
    first_.store(Clock::duration::max().count());
    last_.store(Clock::duration::min().count());
  }
  /// Some of them moved from @p first until @p last.
  void add(Clock::time_point first, Clock::time_point last) noexcept {
    keep(first_, first.time_since_epoch().count(), std::less<>());
    keep(last_, last.time_since_epoch().count(), std::greater<>());
  }
  Clock::time_point first() const noexcept { return at(first_); }
  Clock::time_point last() const noexcept { return at(last_); }

 private:
  using Count = std::atomic<Clock::rep>;
  /// The first of @p known and @p value in the order of @p before.
  template <class Before>
  static void keep(Count& known, Clock::rep value, Before before) noexcept {
    Clock::rep old = known.load(std::memory_order_relaxed);
    while (before(value, old) &&
           !known.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
    }
  }
  static Clock::time_point at(const Count& count) noexcept {
    return Clock::time_point(Clock::duration(count.load(std::memory_order_relaxed)));
  }

  Count first_{0};
  Count last_{0};
};

/// Of rounds in turn: who is slow still reads a round's when the next has begun.
using PairRounds = std::array<PairTimes, 2>;

/// A region, or a part of one, between two addresses.
struct Task {
  StridedCopy copy;
  const std::byte* source;
  std::byte* destination;
  const std::byte* scales;  ///< Of a copy that quantises, otherwise null.
  PairRounds* pair;         ///< Null inside of one rank.
};

/// What the sessions of all ranks share: the work, and how far everyone is.
class SharedRound {
 public:
  explicit SharedRound(std::size_t ranks) : memory(ranks), links(ranks), arrivals_(ranks, 0) {}

  /// A rank reaches its next step. Does not wait. The last one of a step wakes the others: nobody
  /// is a step ahead of what all have reached.
  void arrive(Rank rank) {
    const std::lock_guard lock(mutex_);
    ++arrivals_[static_cast<std::size_t>(rank)];
    if (++all_arrivals_ % arrivals_.size() == 0) {
      changed_.notify_all();
    }
  }

  /// Waits until every rank has reached step @p step (counted from 1).
  void wait_all(std::uint64_t step, const std::string& phase, Deadline deadline) {
    std::unique_lock lock(mutex_);
    const auto reached = [&] { return all_arrivals_ >= step * arrivals_.size(); };
    while (true) {
      // Also when everyone is here: after an abort tasks are left undone, and the round must not
      // pass for complete.
      if (aborted_) {
        throw TransportError(Errc::peer_lost, "loopback: a rank gave up in " + phase +
                                                  "; ranks not there yet: " + missing(step));
      }
      if (reached()) {
        return;
      }
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && !aborted_ &&
          !reached()) {
        aborted_ = true;
        changed_.notify_all();
        throw TransportError(Errc::timed_out, "loopback: the deadline passed in " + phase +
                                                  "; ranks missing: " + missing(step));
      }
    }
  }

  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  /// The next task of a stage, or nothing when there is none left or the round has ended. Each one
  /// is handed back by done().
  const Task* take(std::size_t stage) {
    busy_.fetch_add(1);
    if (!aborted_) {
      const std::size_t at = stages[stage].next.fetch_add(1, std::memory_order_relaxed);
      if (at < stages[stage].tasks.size()) {
        return &stages[stage].tasks[at];
      }
    }
    busy_.fetch_sub(1);
    return nullptr;
  }
  void done() { busy_.fetch_sub(1); }

  /// Ends the round, and returns when no rank touches anybody's memory any more: at most one task
  /// a rank is under way.
  void abort_and_drain() noexcept {
    abort();
    while (busy_ != 0) {
      std::this_thread::yield();
    }
  }

  struct Stage {
    std::vector<Task> tasks;
    std::atomic<std::size_t> next{0};
  };

  /// A pair that moves something, as one of its ranks keeps it.
  struct Link {
    Rank peer;
    PairRounds* times;
  };

  std::vector<RankMemory> memory;
  std::vector<Stage> stages;     ///< Sized before the ranks fill it.
  std::mutex filling;            ///< Guards what follows, and stages, while the ranks fill them.
  std::uint64_t bytes = 0;       ///< Of one round, all ranks.
  std::deque<PairRounds> times;  ///< Of the pairs that move something.
  std::vector<std::vector<Link>> links;  ///< [rank], of the pairs that it is in.

 private:
  std::string missing(std::uint64_t step) const {
    std::string text;
    for (std::size_t rank = 0; rank < arrivals_.size(); ++rank) {
      if (arrivals_[rank] < step) {
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    return text.empty() ? "none" : text;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> arrivals_;  // steps reached, by rank
  std::uint64_t all_arrivals_ = 0;       // their sum
  std::atomic<bool> aborted_ = false;
  std::atomic<std::size_t> busy_ = 0;  // tasks taken and not done
};

}  // namespace m2n::loopback
