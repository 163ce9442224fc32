// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the store knows of one world: who is there, what they wait for, keys and mail. No sockets.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/rendezvous/wire.hpp"

namespace m2n {

/// More ranks than any job has; keeps a mistyped size from taking all memory.
inline constexpr Rank kMaxWorldRanks = Rank{1} << 22U;

struct Refusal {
  bool again = false;  ///< It may work later: the client should try until its deadline.
  Errc code = Errc::bad_argument;
  std::string text;  ///< Starts with the phase.
};
/// One that concerns the rendezvous.
Refusal refused_join(bool again, Errc code, const std::string& why);

/// One world of one epoch. Single-threaded: events come in, frames for ranks go out by @p deliver.
///
/// Errors of clients are theirs: a failure of the world goes to every rank, and wire::Malformed
/// says that the caller should disconnect the rank that sent this.
class World {
 public:
  using Payload = std::shared_ptr<const std::string>;
  using Deliver = std::function<void(Rank, wire::Kind, std::uint64_t request, const Payload&)>;

  World(Rank size, std::uint64_t epoch, std::uint64_t max_value_bytes, Deliver deliver);

  /// Why the rank cannot join().
  std::optional<Refusal> refusal(const wire::Hello& hello) const;
  /// @param proof  Goes into the rank's welcome, which is sent when all ranks are there.
  void join(const wire::Hello& hello, std::string proof, Deadline now);
  void request(Rank rank, const wire::Header& header, std::string_view payload, Deadline now);
  /// The rank's connection is over. Unless it had said goodbye this fails the world.
  void gone(Rank rank, const std::string& why);
  void fail(Errc code, const std::string& text);

  std::optional<Deadline> next_deadline() const;
  void expire(Deadline now);

 private:
  enum class Presence { absent, present, left };
  enum class WaitFor { nothing, ranks, collective, mail, key };
  struct Member {
    Presence presence = Presence::absent;
    Peer peer;
    std::string proof;
    std::string farewell;
    std::uint64_t next_collective = 0;
    std::string last_phase = "rendezvous";
    WaitFor wait_for = WaitFor::nothing;
    std::uint64_t request = 0;
    Deadline deadline;
    std::uint64_t collective = 0;
    Rank from = 0;
    std::string name;  ///< The phase or the key that it waits for.
  };
  struct Gathering {
    wire::Operation operation = wire::Operation::barrier;
    std::string phase;
    Rank root = 0;
    Rank first = 0;
    std::vector<std::optional<Statement>> statements;  ///< By rank.
    Rank arrived = 0;
    Payload broadcast;
  };
  struct Letter {
    std::string phase;
    std::string value;
  };

  Member& member(Rank rank) { return members_[static_cast<std::size_t>(rank)]; }
  Rank size() const { return static_cast<Rank>(members_.size()); }
  template <class Picked>
  std::vector<Rank> pick(Picked picked) const;

  void wait(Rank rank, WaitFor what, std::uint64_t request, std::uint64_t wait_us, Deadline now);
  void end_wait(Rank rank);
  void reply(Rank rank, const Payload& payload);
  void answer(Rank rank, std::uint64_t request, std::string payload);
  void welcome_all();

  void collective(Rank rank, std::uint64_t request, std::string_view payload, Deadline now);
  bool in_step(Rank rank, const wire::Collective& call, const Gathering& gathering);
  void finish(std::uint64_t sequence, Gathering& gathering);
  /// Fails when the root can no longer come; forgets the gathering when nobody else will.
  void settle_broadcast(std::uint64_t sequence, const Gathering& gathering);
  bool has_all(const Gathering& gathering) const;
  std::vector<Rank> missing(const Gathering& gathering) const;
  /// Fails the world when one that has left is missing.
  void miss_the_left(const Gathering& gathering);

  void send(Rank rank, std::uint64_t request, wire::Reader reader);
  void receive(Rank rank, std::uint64_t request, wire::Reader reader, Deadline now);
  /// Gives the rank that waits for mail of @p from its oldest letter.
  void hand_over(Rank from, Rank to);
  void keys(Rank rank, const wire::Header& header, wire::Reader reader, Deadline now);
  void set(const std::string& key, std::string value);
  void add(Rank rank, std::uint64_t request, const std::string& key, std::int64_t amount);
  void leave(Rank rank, std::string farewell);

  void fail_left(const std::string& phase, const std::vector<Rank>& ranks);
  void fail_late(const std::string& phase, const std::vector<Rank>& ranks);

  std::uint64_t epoch_;
  std::uint64_t max_value_bytes_;
  Deliver deliver_;
  std::vector<Member> members_;
  Rank present_ = 0;
  bool complete_ = false;
  std::vector<Rank> left_;
  std::set<std::pair<Deadline, Rank>> deadlines_;
  std::map<std::uint64_t, Gathering> gatherings_;             ///< Unfinished, by sequence.
  std::map<std::pair<Rank, Rank>, std::deque<Letter>> mail_;  ///< From, to.
  std::map<std::string, std::string> keys_;
  std::map<std::string, std::set<Rank>> key_waiters_;  ///< May name ranks that gave up.
  std::optional<Refusal> failure_;
};

}  // namespace m2n
