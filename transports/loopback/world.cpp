// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/loopback/world.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace m2n::loopback {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

/// How long a rank sleeps before it looks whether the others are alive.
constexpr milliseconds kSlice{100};
/// A rank that has not shown itself for so long is stopped, or busy with something else.
constexpr milliseconds kSilent{300};

std::int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(Clock::now().time_since_epoch()).count();
}

std::string list(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::uint64_t SharedWorld::segment_bytes(Rank size) {
  return page_aligned(sizeof(State) * (static_cast<std::uint64_t>(size) + 1));
}

SharedWorld::SharedWorld(Descriptor segment, Rank rank, Rank size)
    : segment_(std::move(segment)),
      memory_(segment_, 0, segment_bytes(size)),
      rank_(rank),
      size_(size) {
  static_assert(sizeof(Head) <= sizeof(State));
  for (Rank other = 0; other < size; ++other) {
    if (other != rank) {
      others_.push_back(other);
    }
  }
  hold_byte(segment_, static_cast<std::uint64_t>(rank));
}

SharedWorld::Head& SharedWorld::head() const noexcept {
  return *reinterpret_cast<Head*>(memory_.data());
}

SharedWorld::State& SharedWorld::state(Rank rank) const noexcept {
  return reinterpret_cast<State*>(memory_.data())[rank + 1];
}

void SharedWorld::begin_round(std::uint64_t version) {
  ++round_;
  beat();
  state(rank_).version.store(version, std::memory_order_relaxed);
  state(rank_).begun.store(round_);
}

void SharedWorld::beat() noexcept {
  state(rank_).beat_ms.store(now_ms(), std::memory_order_relaxed);
}

void SharedWorld::fail(Rank rank, Cause cause) noexcept {
  std::uint64_t none = 0;
  const auto word = 2 * (static_cast<std::uint64_t>(rank) + 1) + static_cast<std::uint64_t>(cause);
  head().failed.compare_exchange_strong(none, word);
  wake_all(head().round_over);
}

void SharedWorld::check(const std::string& phase) const {
  const std::uint64_t failed = head().failed.load();
  if (failed == 0) {
    return;
  }
  const std::string rank = std::to_string(failed / 2 - 1);
  if (failed % 2 == static_cast<std::uint64_t>(Cause::ended)) {
    throw TransportError(Errc::peer_lost,
                         "loopback: in " + phase + ": rank " + rank + " has ended");
  }
  throw TransportError(Errc::peer_lost, "loopback: in " + phase + ": rank " + rank +
                                            " gave up; ranks not there yet: " + missing(others_));
}

std::string SharedWorld::missing(std::span<const Rank> awaited) const {
  std::vector<Rank> ranks;
  const std::int64_t silent_since = now_ms() - kSilent.count();
  for (const Rank rank : others_) {
    const State& other = state(rank);
    if (other.ended.load() < round_ &&
        (other.begun.load() < round_ ||
         other.beat_ms.load(std::memory_order_relaxed) < silent_since)) {
      ranks.push_back(rank);
    }
  }
  if (ranks.empty()) {
    std::copy_if(awaited.begin(), awaited.end(), std::back_inserter(ranks),
                 [this](Rank rank) { return state(rank).ended.load() < round_; });
  }
  return list(ranks);
}

nanoseconds SharedWorld::slice(Deadline deadline) const {
  return std::min<nanoseconds>(kSlice, deadline - Clock::now());
}

void SharedWorld::look_after_sleep(bool rung, const std::string& phase,
                                   std::span<const Rank> awaited, Deadline deadline) {
  beat();
  check(phase);
  if (Clock::now() >= deadline) {
    fail(rank_, Cause::gave_up);
    throw TransportError(
        Errc::timed_out,
        "loopback: in " + phase + ": the deadline passed; ranks missing: " + missing(awaited));
  }
  if (rung) {
    return;
  }
  for (const Rank rank : awaited) {
    if (state(rank).ended.load() < round_ &&
        !is_byte_held(segment_, static_cast<std::uint64_t>(rank))) {
      fail(rank, Cause::ended);
      check(phase);
    }
  }
}

void SharedWorld::wait(Doorbell& bell, std::uint32_t seen, const std::string& phase,
                       std::span<const Rank> awaited, Deadline deadline) {
  beat();
  const bool rung = bell.sleep(seen, slice(deadline));
  look_after_sleep(rung, phase, awaited, deadline);
}

void SharedWorld::end_round(Deadline deadline) {
  static const std::string kPhase = "round end";
  check(kPhase);
  state(rank_).ended.store(round_);
  if (head().arrived.fetch_add(1) + 1 == round_ * static_cast<std::uint64_t>(size_)) {
    head().round_over.store(static_cast<std::uint32_t>(round_));
    wake_all(head().round_over);
    return;
  }
  const auto over = [this](std::uint32_t last) {
    return static_cast<std::int32_t>(last - static_cast<std::uint32_t>(round_)) >= 0;
  };
  for (std::uint32_t last = head().round_over.load(); !over(last);
       last = head().round_over.load()) {
    const bool rung = wait_on(head().round_over, last, slice(deadline));
    if (!over(head().round_over.load())) {
      look_after_sleep(rung, kPhase, others_, deadline);
    }
  }
}

}  // namespace m2n::loopback
