// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What moves between this rank and one peer, compiled to addresses: through a ring of memory that
/// both map, or, on the wire, by puts of long rows and packed chunks of the rest.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api/copy_queue.hpp"
#include "transports/common/packed.hpp"
#include "transports/common/rank_memory.hpp"
#include "transports/ucx/context.hpp"
#include "transports/ucx/options.hpp"

namespace m2n::ucx {

/// Registered ranges of this rank's memory; ranges that share a page of the host are one, and on a
/// device those that overlap.
class Zones {
 public:
  /// @pre register_all() has not been called.
  void add(std::byte* data, std::uint64_t bytes);
  void register_all(const std::shared_ptr<const Context>& context, MemorySpace space);
  /// The number of the zone that holds @p data. @pre It was added.
  std::size_t find(const std::byte* data) const;
  const RegisteredMemory& zone(std::size_t number) const { return zones_[number]; }

 private:
  std::vector<std::pair<std::byte*, std::byte*>> ranges_;  // [begin, end)
  std::vector<RegisteredMemory> zones_;                    // sorted by address
};

/// What a receiver tells a sender, once.
struct Keys {
  std::uint64_t ring_address = 0;
  std::uint64_t slot_bytes = 0;  ///< 0: no ring.
  std::uint64_t put_bytes = 0;   ///< As in Way.
  bool direct = false;           ///< The sender may take this way, when it can map the memory.
  std::string ring_key;
  std::vector<std::string> zone_keys;
  /// Zone and address of the first element of each region that has bytes, in the order of the pair.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> regions;

  std::string text() const;
  static Keys parse(const std::string& text);
  /// Without what the direct way needs.
  Keys staged() const;
};

/// A ring of slots, in memory of the receiver that the sender maps. Its slots follow. Counts only
/// grow; a message goes to an end that sleeps, and to no other.
struct alignas(64) Ring {
  static constexpr std::uint64_t kSlots = 4;
  static constexpr std::uint64_t kFrontBytes = 4096;

  alignas(64) std::atomic<std::uint64_t> filled;
  std::atomic<std::uint32_t> sender_sleeps;
  alignas(64) std::atomic<std::uint64_t> emptied;
  std::atomic<std::uint32_t> receiver_sleeps;

  static std::uint64_t bytes(std::uint64_t slot_bytes) { return kFrontBytes + kSlots * slot_bytes; }
  std::byte* slot(std::uint64_t number, std::uint64_t slot_bytes) {
    return reinterpret_cast<std::byte*>(this) + kFrontBytes + (number % kSlots) * slot_bytes;
  }
};

/// A contiguous row, written straight into the peer's view.
struct Put {
  const std::byte* source = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::uint32_t zone = 0;         ///< Of the peer.
  std::uint32_t source_zone = 0;  ///< Of this rank.
};

/// How a pair moves its regions.
struct Way {
  bool ring = false;              ///< Through the ring what is not put.
  std::uint64_t chunk_bytes = 0;  ///< Of a slot of the ring, or of a message.
  std::uint64_t put_bytes = 0;    ///< Rows from here on are put; 0: none.
  /// From device to device: UCX puts long rows, and the sender's device writes the rest into memory
  /// of the receiver that UCX has mapped.
  bool direct = false;

  /// True when @p copy is written straight into its destination, instead of packed.
  bool puts(const StridedCopy& copy) const { return direct || has_long_rows(copy); }
  bool has_long_rows(const StridedCopy& copy) const;
};

/// From this rank to a peer.
struct Outgoing {
  PackedPair packed{true};
  std::vector<CopyQueue::List> lists;  ///< [chunk] where this rank's memory is a device's.
  std::vector<Put> puts;
  std::vector<std::size_t> put_end;           ///< [stage] in puts
  std::vector<bool> has_puts;                 ///< [stage]
  std::vector<CopyQueue::List> mapped_lists;  ///< [stage] of the direct way
  std::vector<RemoteKey> zone_keys;
  RemoteKey ring_key;
  Ring* ring = nullptr;  ///< The peer's, as mapped here; null on the wire.
  std::shared_ptr<void> ring_pin;
  Way way;
};

/// From a peer to this rank.
struct Incoming {
  PackedPair packed{false};
  std::vector<CopyQueue::List> lists;  ///< As in Outgoing.
  std::vector<bool> has_puts;          ///< [stage]
  Ring* ring = nullptr;                ///< Null on the wire.
  Way way;
};

/// The regions of one pair, in the order that both ranks share.
using PairRegions = std::vector<const Region*>;

/// True when some rows of @p regions could be put and have at least @p least bytes, and less than
/// @p end.
bool has_rows_between(const PairRegions& regions, std::uint64_t least, std::uint64_t end);

/// Adds the ends of @p regions that are put to @p zones; on a device, the allocations that they are
/// of.
void add_zones(const PairRegions& regions, Endpoint Region::*end, RankMemory& memory,
               const Way& way, Zones& zones);

/// @param ring  Of this pair; null on the wire. @param queue  Takes the lists; null where this
/// rank's memory is the host's.
Incoming compile_incoming(const PairRegions& regions, std::uint32_t stage_count, RankMemory& memory,
                          const Way& way, Ring* ring, CopyQueue* queue);

/// What the sender of @p regions has to know. @param ring_key  Of all rings of this rank.
Keys keys_for(const PairRegions& regions, RankMemory& memory, const Incoming& in,
              const Zones& zones, const std::string& ring_key);

/// @param queue  As above. @throws TransportError{unavailable} when the ring, or the memory that
/// the direct way needs, cannot be mapped; the queue is then as it was.
Outgoing compile_outgoing(const PairRegions& regions, std::uint32_t stage_count, RankMemory& memory,
                          const UcxOptions& options, const Zones& sources, const Keys& keys,
                          ucp_ep_h endpoint, CopyQueue* queue);

}  // namespace m2n::ucx
