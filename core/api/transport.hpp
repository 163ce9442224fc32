// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Transports: run a program's rounds between the ranks of a group.

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/group.hpp"
#include "core/api/registry.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

/// What moved between this rank and one peer in a round.
struct PeerTraffic {
  Rank peer = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::string path;  ///< How, e.g. "memory", "window", "wire".
  /// From the first byte until the last, in seconds from start(); NaN where nobody measures.
  double start_seconds = std::numeric_limits<double>::quiet_NaN();
  double end_seconds = std::numeric_limits<double>::quiet_NaN();
};

/// One rank's measurements of one round.
struct RoundReport {
  std::uint64_t version = 0;
  double seconds = 0;              ///< From start() until wait() had nothing left to wait for.
  std::uint64_t copied_bytes = 0;  ///< Local copies.
  std::vector<PeerTraffic> peers;  ///< By peer; pairs without bytes are left out.
};

/// What a round of @p program moves, all by one @p path; no version and no time yet.
RoundReport expected_report(const Program& program, std::string_view path);

/// A program and buffers, compiled once, run round after round.
///
/// - Collective: every rank of the group runs the same rounds in the same order.
/// - Threads: one thread at a time; abort() from any thread.
/// - Memory: the buffers stay the caller's and must outlive the session; a round allocates nothing.
/// - Streams: work queued before start() on the caller's stream is seen by the round.
/// - Errors: TransportError{timed_out, peer_lost} naming the phase and the ranks missing. After an
///   error destination memory is undefined, and only the destructor may run.
class Session {
 public:
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  /// Gives up on an unfinished round; does not wait for peers.
  virtual ~Session() = default;

  /// Begins the round and returns. Before it is called nobody touches this rank's buffers for the
  /// round, so that sessions in turn may share them. @param version  Larger than that of the round
  /// before.
  virtual void start(std::uint64_t version, Deadline deadline) = 0;
  /// Returns when every receive and copy of this rank has landed and every send of this rank has
  /// been read, on all ranks' view of their memory.
  virtual RoundReport wait(Deadline deadline) = 0;
  /// Makes start() and wait() of every rank that shares this session's round fail soon.
  virtual void abort() noexcept = 0;
  /// Memory that this rank keeps for the session beside its buffers: staging, scratch, lists.
  /// Nothing where nobody counts.
  virtual std::optional<std::uint64_t> extra_bytes() const { return {}; }
};

/// Moves regions between the ranks of one group.
///
/// Order of calls: connect() once, then prepare() any number of times.
///
/// - Collective: connect() and prepare(), by every rank in the same order.
/// - Threads: not thread-safe; objects of different ranks may run in different threads.
/// - Memory: never allocates, frees or resizes weight memory.
/// - Streams: see Session.
/// - Errors: TransportError; see Session.
class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  /// Registry name, e.g. "loopback". Stable: it is written into dumps.
  virtual std::string_view name() const noexcept = 0;
  /// False where a round only tells how long it would take: RoundReport::seconds is then all that
  /// there is, and destination memory keeps what it held.
  virtual bool moves_bytes() const noexcept { return true; }

  /// Whether buffers may lie in @p space.
  virtual bool moves(MemorySpace space) const noexcept { return space == MemorySpace::host; }

  /// Sets up links to every peer. @param group  Must outlive the transport and its sessions.
  virtual void connect(Group& group, Deadline deadline) = 0;

  /// Compiles @p program over @p buffers. Afterwards a round does no planning, no allocation and no
  /// host work a parameter.
  virtual std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                           Deadline deadline) = 0;
};

struct TransportContext {
  Options options;
  /// Most thread blocks of a GPU that a round may occupy. Nothing to cap where there is no GPU.
  std::optional<int> max_cta = {};
  /// That this rank's weights live on, unless an option says otherwise. Nothing where they live in
  /// host memory.
  std::optional<int> device = {};
};
using TransportRegistry = Registry<Transport, TransportContext>;

}  // namespace m2n
