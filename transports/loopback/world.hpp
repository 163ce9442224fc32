// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the processes of one session share besides their rings: who has arrived where, who is
/// alive, and whether the round has failed.

#include <atomic>
#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "transports/common/segment.hpp"

namespace m2n::loopback {

using Clock = std::chrono::steady_clock;

/// Rounds larger than any last-level cache are written past it: nobody reads the bytes soon.
inline constexpr std::uint64_t kBypassBytes = 64 << 20;

/// A word that one rank sleeps on; others ring it. Lives in shared memory.
struct Doorbell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleeping;

  void ring() noexcept {
    rings.fetch_add(1);
    if (sleeping.load() != 0) {
      wake_all(rings);
    }
  }
  bool sleep(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept {
    sleeping.store(1);
    const bool rung = wait_on(rings, seen, limit);
    sleeping.store(0);
    return rung;
  }
};

/// The world of one session, in a segment that rank 0 owns.
///
/// - Threads: the rank's own; fail() from any.
/// - Errors: TransportError{timed_out, peer_lost} naming the phase and the ranks missing.
class SharedWorld {
 public:
  static std::uint64_t segment_bytes(Rank size);

  /// @param segment  Opened by this rank for itself.
  SharedWorld(Descriptor segment, Rank rank, Rank size);

  /// This rank begins its next round.
  void begin_round(std::uint64_t version);
  std::uint64_t round() const noexcept { return round_; }
  /// Tells the others that this rank is not stopped.
  void beat() noexcept;

  enum class Cause : std::uint32_t { gave_up, ended };
  /// Ends the round for all, because of @p rank. The first cause stays.
  void fail(Rank rank, Cause cause) noexcept;
  /// Throws when the round has failed.
  void check(const std::string& phase) const;
  /// Waits a while on @p bell, for any of @p awaited. Throws when the round has failed, when the
  /// deadline has passed, or when one of them has ended.
  void wait(Doorbell& bell, std::uint32_t seen, const std::string& phase,
            std::span<const Rank> awaited, Deadline deadline);
  /// Returns when every rank has come here in this round.
  void end_round(Deadline deadline);

 private:
  struct Head {
    std::atomic<std::uint64_t> arrived;     // at the end of rounds, of all ranks
    std::atomic<std::uint32_t> round_over;  // the last round, modulo 2^32
    std::atomic<std::uint64_t> failed;      // 0, or 2 * (rank + 1) + cause
  };
  struct alignas(64) State {
    std::atomic<std::uint64_t> begun;    // rounds
    std::atomic<std::uint64_t> ended;    // rounds
    std::atomic<std::uint64_t> version;  // of the round that has begun
    std::atomic<std::int64_t> beat_ms;   // of the steady clock
  };

  Head& head() const noexcept;
  State& state(Rank rank) const noexcept;
  /// The ranks that keep the round up, as well as can be told from here.
  std::string missing(std::span<const Rank> awaited) const;
  void look_after_sleep(bool rung, const std::string& phase, std::span<const Rank> awaited,
                        Deadline deadline);
  std::chrono::nanoseconds slice(Deadline deadline) const;

  Descriptor segment_;
  Mapping memory_;
  Rank rank_;
  Rank size_;
  std::uint64_t round_ = 0;
  std::vector<Rank> others_;
};

}  // namespace m2n::loopback
