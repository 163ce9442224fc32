// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Groups with all that engines need: agreement, broadcast, mail, keys, and who sits where.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/group.hpp"

namespace m2n {

/// Where a rank runs. Two ranks compare members for equality; only names are for people.
struct Peer {
  std::string host_name;
  std::string machine;  ///< Equal for ranks on one running kernel.
  std::string memory;   ///< Equal for ranks that see the same /dev/shm.
  std::string process;  ///< Equal for ranks that are threads of one process.
  std::int64_t pid = 0;

  friend bool operator==(const Peer&, const Peer&) = default;
};

/// What one rank says in agree(): a value that must be equal everywhere, or why it cannot go on.
struct Statement {
  static Statement value(std::string text) { return {false, std::move(text)}; }
  /// Longer texts than kMaxStatementBytes are cut.
  static Statement failure(std::string text) { return {true, std::move(text)}; }

  bool failed = false;
  std::string text;

  friend bool operator==(const Statement&, const Statement&) = default;
};
inline constexpr std::size_t kMaxStatementBytes = 4096;

/// What all ranks said; the same on every rank.
struct Verdict {
  struct Side {
    Statement statement;
    std::vector<Rank> ranks;  ///< Ascending; all that said it.
  };
  /// Distinct statements, failures first, then by lowest rank. At most kMaxSides.
  std::vector<Side> sides;
  /// Ranks whose statements found no room in sides.
  std::vector<Rank> others;

  bool unanimous() const { return sides.size() == 1 && !sides.front().statement.failed; }
};
inline constexpr std::size_t kMaxSides = 16;

/// The reason why @p verdict is not unanimous, in one sentence: "phase 'plan': rank 3: <failure>;
/// ranks 0-2 have 'a', rank 4 has 'b'".
std::string explain(std::string_view phase, const Verdict& verdict);

/// A Group whose ranks may be processes on several machines.
///
/// - Collective: what Group says, agree() and broadcast(); every rank calls them in the same order
///   with the same phase. send() pairs with receive(), in the order of the sender.
/// - Threads: as Group; failure() and abort() from any thread, also during a call of the owner.
/// - Memory: values are copied; one value may be as long as the store allows.
/// - Streams: none.
/// - Errors: as Group. The first failure ends the group for all: every rank, whatever it calls or
///   waits for, gets an Error with the same text, which names the phase and the ranks at fault.
///   When rank 0's process is stopped its silence is noticed up to two seconds past the deadline.
class WorldGroup : public Group {
 public:
  /// Every rank states something; all get the same verdict. The way to compare digests and to
  /// share failures: its traffic grows with the ranks, where that of all_gather() grows with their
  /// square.
  virtual Verdict agree(std::string_view phase, const Statement& statement, Deadline deadline) = 0;

  /// The root does not wait.
  std::string broadcast(std::string_view phase, Rank root, std::string_view value,
                        Deadline deadline) override = 0;

  /// Leaves @p value for @p to; does not wait until it is received.
  virtual void send(std::string_view phase, Rank to, std::string_view value, Deadline deadline) = 0;
  /// The oldest value from @p from that was not received yet. @p phase must be the sender's.
  virtual std::string receive(std::string_view phase, Rank from, Deadline deadline) = 0;

  /// Keys of this world in this epoch. set() replaces; get() waits for the key, and its
  /// Error{timed_out} names the key and does not end the group.
  virtual void set(std::string_view key, std::string_view value, Deadline deadline) = 0;
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  virtual std::optional<std::string> try_get(std::string_view key, Deadline deadline) = 0;
  virtual void erase(std::string_view key, Deadline deadline) = 0;
  /// Adds to a key that holds a decimal number (none counts as 0), and gives the sum.
  virtual std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) = 0;

  /// Where each rank runs, by rank.
  virtual std::vector<Peer> peers(Deadline deadline) = 0;

  virtual std::uint64_t epoch() const noexcept = 0;

  /// Why the group has failed; empty while it has not. Does not wait: a watchdog asks this while
  /// the owner is busy elsewhere (in a transport, say).
  virtual std::string failure() = 0;
  /// Ends the group for all ranks, naming this rank and @p reason. Waits of this rank fail, too.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// Says goodbye with a reason, which others read when they miss this rank. The destructor does it
  /// without one.
  virtual void leave(std::string_view reason) noexcept = 0;
};

/// As WorldGroup::agree(), and throws explain() on every rank unless all said the same value.
/// @throws Error{bad_argument} besides what agree() throws.
void require_agreement(WorldGroup& group, std::string_view phase, const Statement& statement,
                       Deadline deadline);

/// Stands for the epoch of whichever store answers.
inline constexpr std::uint64_t kCurrentEpoch = 0;

struct WorldOptions {
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;
  std::string token;
  /// A store of an earlier epoch is waited out; one of a later epoch refuses. With kCurrentEpoch a
  /// world that has failed already is waited out as well.
  std::uint64_t epoch = kCurrentEpoch;
  /// One store serves several worlds, each with its own ranks, keys and failures.
  std::string world = "job";
  Rank rank = 0;
  Rank size = 1;
};

/// Joins and waits for all other ranks (phase 'rendezvous'); a store that is not there yet is
/// waited for. Takes one descriptor and no thread.
/// @throws Error{timed_out, peer_lost} naming the ranks missing; Error{bad_argument} for a wrong
///         token, another size than the others', or a rank that is taken.
std::unique_ptr<WorldGroup> join_world(const WorldOptions& options, Deadline deadline);

}  // namespace m2n
