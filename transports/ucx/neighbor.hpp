// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A peer of a session, and how far it is in its rounds. Values of the session, under its lock.

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/api/transport.hpp"
#include "transports/ucx/routes.hpp"
#include "transports/ucx/worker.hpp"

namespace m2n::ucx {

/// From the first byte until the last of a round in one direction, as this rank sees it: puts of
/// a peer come without a word, and only the peer can tell.
class Moved {
 public:
  void reset() { *this = {}; }
  void begin() { first_ = first_.value_or(std::chrono::steady_clock::now()); }
  void end() { last_ = std::chrono::steady_clock::now(); }
  /// Widens the span of @p traffic.
  void add_to(PeerTraffic& traffic, std::chrono::steady_clock::time_point start) const;

 private:
  std::optional<std::chrono::steady_clock::time_point> first_;
  std::chrono::steady_clock::time_point last_;
};

/// Slots of a ring that the device packs or unpacks.
struct SlotsUnderWay {
  std::uint64_t begun = 0;  ///< Slots, over all rounds.
  std::array<CopyQueue::Ticket, Ring::kSlots> tickets{};
};

/// A peer, and how far it is in its rounds.
struct Neighbor {
  Peer* peer = nullptr;
  std::optional<Outgoing> out;
  std::optional<Incoming> in;
  std::optional<std::uint64_t> route;  ///< What it said, in kRoute flags of the session.
  std::uint64_t put_bytes = 0;         ///< Its own, likewise.
  std::string keys;
  std::uint64_t begun = 0;       ///< Its last round that it has begun,
  std::uint64_t version = 0;     ///< and that one's version.
  std::uint64_t open_stage = 0;  ///< Of round `begun`, the last that may be written.
  std::uint64_t finished = 0;    ///< Its last round that it has finished; known to rank 0.
  bool quiet = false;            ///< It has failed, and will not write here.
  bool left = false;
  // Outgoing
  std::uint64_t filled = 0;  ///< Slots, over all rounds.
  SlotsUnderWay packing;
  std::size_t next_chunk = 0;
  std::size_t next_put = 0;
  Pending puts;
  Pending flush;
  bool flushing = false;
  bool told = false;          ///< That the puts of this stage are complete.
  bool mapped_begun = false;  ///< The list of this stage that the device writes to the peer.
  CopyQueue::Ticket mapped_ticket = 0;
  Moved sent;
  // Incoming
  std::uint64_t emptied = 0;  ///< Slots, over all rounds.
  SlotsUnderWay unpacking;
  std::vector<std::uint64_t> chunks_done;  ///< [stage]
  std::vector<std::uint64_t> puts_done;    ///< [stage] the last round in which they were complete.
  Moved received;
};

}  // namespace m2n::ucx
