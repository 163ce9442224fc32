// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/loopback/processes.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <sstream>

#include "core/error.hpp"
#include "transports/common/agree.hpp"
#include "transports/common/packed.hpp"
#include "transports/common/rank_memory.hpp"
#include "transports/common/segment.hpp"
#include "transports/loopback/world.hpp"

namespace m2n::loopback {
namespace {

constexpr std::uint64_t kSlots = 4;
constexpr std::uint64_t kLargestSlot = 256 << 10;  // stays in the second-level cache
constexpr std::uint64_t kSmallestSlot = 4 << 10;
constexpr std::uint64_t kRingBytes = 8 << 20;  // of a rank, as long as slots are not too small

/// One ring from one rank to the owner of the segment. Counts only grow.
struct alignas(64) Ring {
  std::int64_t sender;
  std::uint64_t offset_bytes;  // of its slots in the segment
  std::array<std::uint64_t, kSlots> versions;
  alignas(64) std::atomic<std::uint64_t> filled;
  alignas(64) std::atomic<std::uint64_t> emptied;
};

/// What a rank's segment starts with; its rings follow.
struct alignas(64) Head {
  std::uint64_t cookie;
  std::uint64_t slot_bytes;
  std::uint64_t ring_count;
  alignas(64) Doorbell bell;
};

/// The first pages of a rank's segment.
class Front {
 public:
  Front() = default;
  Front(const Descriptor& segment, std::uint64_t rings) : memory_(segment, 0, bytes(rings)) {}
  static std::uint64_t bytes(std::uint64_t rings) {
    return page_aligned(sizeof(Head) + rings * sizeof(Ring));
  }
  Head& head() const { return *reinterpret_cast<Head*>(memory_.data()); }
  Ring& ring(std::uint64_t i) const {
    return reinterpret_cast<Ring*>(memory_.data() + sizeof(Head))[i];
  }

 private:
  Mapping memory_;
};

/// How to open a rank's segment.
struct Address {
  std::int64_t process = 0;
  int segment = -1;
  int world = -1;  ///< Of rank 0.
  std::uint64_t cookie = 0;
  std::uint64_t rings = 0;
  std::string plan_digest;

  std::string text() const {
    std::ostringstream out;
    out << process << ' ' << segment << ' ' << world << ' ' << cookie << ' ' << rings << ' '
        << plan_digest;
    return out.str();
  }
  static Address parse(const std::string& text) {
    Address out;
    std::istringstream in(text);
    in >> out.process >> out.segment >> out.world >> out.cookie >> out.rings >> out.plan_digest;
    return out;
  }
};

/// One direction between this rank and a peer.
struct Pair {
  Rank peer = 0;
  Mapping slots;
  Ring* ring = nullptr;
  Doorbell* bell = nullptr;  ///< The peer's.
  std::uint64_t slot_bytes = 0;
  PackedPair packed;
  std::uint64_t moved = 0;  ///< Chunks, over all rounds.
  std::size_t next = 0;     ///< Chunk of this round.
  Clock::time_point first;  ///< When the first chunk of this round began to move,
  Clock::time_point last;   ///< and the last one had, on this rank.

  explicit Pair(Rank rank, bool sending) : peer(rank), packed(sending) {}
  std::byte* slot() const { return slots.data() + (moved % kSlots) * slot_bytes; }
  void begin_chunk() {
    if (next == 0) {
      first = Clock::now();
    }
  }
  void end_chunk() {
    if (++next == packed.chunk_count()) {
      last = Clock::now();
    }
  }
};

/// Cuts @p regions, of one pair, into chunks.
void compile(const std::vector<const Region*>& regions, bool sending, std::uint32_t stage_count,
             RankMemory& memory, Pair& pair) {
  auto at = regions.begin();
  for (std::uint32_t stage = 0; stage < stage_count; ++stage) {
    std::vector<PlacedRegion> placed;
    for (; at != regions.end() && (*at)->stage == stage; ++at) {
      placed.push_back({(*at)->copy, memory.place(sending ? (*at)->from : (*at)->to),
                        sending ? memory.scales_of(**at) : LocalBuffer{}});
    }
    pair.packed.add_stage(placed, pair.slot_bytes);
  }
}

class ProcessSession final : public Session {
 public:
  ProcessSession(const Program& program, const Buffers& buffers)
      : rank_(program.rank), report_(expected_report(program, "shared memory")) {
    memory_.buffers = buffers;
    memory_.scratch.resize(program.scratch_bytes);
    copies_.resize(program.stage_count);
    for (std::uint32_t stage = 0; stage < program.stage_count; ++stage) {
      phases_.push_back("stage " + std::to_string(stage));
    }
    for (const Region& region : program.copies) {
      copies_[region.stage].push_back(region);
    }
    for (const auto* regions : {&program.receives, &program.copies}) {
      for (const Region& region : *regions) {
        bytes_ += region.bytes;
      }
    }
  }

  /// Makes this rank's segment. @return how the others open it.
  Address offer(const Program& program, Rank size) {
    const auto receives = by_peer(program.receives, &Region::from);
    const std::uint64_t rings = receives.size();
    const std::uint64_t share = kRingBytes / kSlots / std::max<std::uint64_t>(1, rings);
    const std::uint64_t slot_bytes =
        std::clamp(share / kSmallestSlot * kSmallestSlot, kSmallestSlot, kLargestSlot);
    const std::uint64_t ring_bytes = page_aligned(kSlots * slot_bytes);
    segment_ = create_segment(Front::bytes(rings) + rings * ring_bytes);
    front_ = Front(segment_, rings);
    std::random_device random;
    Address address{.process = ::getpid(),
                    .segment = segment_.get(),
                    .world = offer_world(size),
                    .cookie = (std::uint64_t{random()} << 32) | random(),
                    .rings = rings,
                    .plan_digest = program.plan_digest};
    front_.head().cookie = address.cookie;
    front_.head().slot_bytes = slot_bytes;
    front_.head().ring_count = rings;
    std::uint64_t i = 0;
    for (const auto& [peer, regions] : receives) {
      Ring& ring = front_.ring(i);
      ring.sender = peer;
      ring.offset_bytes = Front::bytes(rings) + i * ring_bytes;
      Pair pair(peer, false);
      pair.slots = Mapping(segment_, ring.offset_bytes, ring_bytes);
      pair.ring = &ring;
      pair.slot_bytes = slot_bytes;
      compile(regions, false, program.stage_count, memory_, pair);
      in_.push_back(std::move(pair));
      ++i;
    }
    return address;
  }

  /// Opens what the others offered.
  void open(const Program& program, const std::vector<Address>& all) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].plan_digest != program.plan_digest) {
        throw Error(Errc::bad_plan, "loopback: rank " + std::to_string(rank) +
                                        " runs another plan than rank " + std::to_string(rank_) +
                                        "; every rank must plan the same problem");
      }
    }
    world_.emplace(open_segment(all[0].process, all[0].world), rank_,
                   static_cast<Rank>(all.size()));
    const auto sends = by_peer(program.sends, &Region::to);
    for (Pair& pair : in_) {
      if (!sends.contains(pair.peer)) {
        open_front(pair.peer, all);
      }
    }
    for (const auto& [peer, regions] : sends) {
      const Descriptor segment = open_front(peer, all);
      const Front& front = fronts_.at(peer);
      Pair pair(peer, true);
      pair.slot_bytes = front.head().slot_bytes;
      for (std::uint64_t i = 0; i < front.head().ring_count; ++i) {
        if (front.ring(i).sender == rank_) {
          pair.ring = &front.ring(i);
        }
      }
      if (pair.ring == nullptr) {
        throw Error(Errc::bad_plan, "loopback: rank " + std::to_string(peer) +
                                        " awaits nothing from rank " + std::to_string(rank_) +
                                        ", which has regions for it");
      }
      pair.slots =
          Mapping(segment, pair.ring->offset_bytes, page_aligned(kSlots * pair.slot_bytes));
      compile(regions, true, program.stage_count, memory_, pair);
      out_.push_back(std::move(pair));
    }
    for (std::vector<Pair>* pairs : {&in_, &out_}) {
      for (Pair& pair : *pairs) {
        pair.bell = &fronts_.at(pair.peer).head().bell;
      }
    }
    awaited_.reserve(in_.size() + out_.size());
  }

  /// Everyone has opened it.
  void close_descriptors() {
    segment_ = {};
    world_segment_ = {};
  }

  ~ProcessSession() override {
    if (running_) {
      abort();
    }
  }

  void start(std::uint64_t version, Deadline) override {
    report_.version = version;
    running_ = true;
    started_ = Clock::now();
    world_->begin_round(version);
  }

  RoundReport wait(Deadline deadline) override {
    for (std::vector<Pair>* pairs : {&in_, &out_}) {
      for (Pair& pair : *pairs) {
        pair.next = 0;
      }
    }
    for (std::size_t stage = 0; stage < copies_.size(); ++stage) {
      run_stage(stage, deadline);
    }
    world_->end_round(deadline);
    running_ = false;
    tell_times();
    report_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    return report_;
  }

  void abort() noexcept override {
    world_->fail(rank_, SharedWorld::Cause::gave_up);
    for (const auto& [peer, front] : fronts_) {
      front.head().bell.ring();
    }
    front_.head().bell.ring();
  }

 private:
  int offer_world(Rank size) {
    if (rank_ == 0) {
      world_segment_ = create_segment(SharedWorld::segment_bytes(size));
    }
    return world_segment_.get();
  }

  Descriptor open_front(Rank peer, const std::vector<Address>& all) {
    const Address& address = all[static_cast<std::size_t>(peer)];
    Descriptor segment = open_segment(address.process, address.segment);
    Front front(segment, address.rings);
    if (front.head().cookie != address.cookie) {
      throw TransportError(Errc::unavailable,
                           "loopback: process " + std::to_string(address.process) +
                               " of this machine is not rank " + std::to_string(peer));
    }
    fronts_.emplace(peer, std::move(front));
    return segment;
  }

  /// When each peer's bytes moved, either way. Both lists of pairs and the report are by peer.
  void tell_times() {
    auto in = in_.begin();
    auto out = out_.begin();
    for (PeerTraffic& traffic : report_.peers) {
      Clock::time_point first = Clock::time_point::max();
      Clock::time_point last = Clock::time_point::min();
      const auto take = [&](std::vector<Pair>::iterator& pair, std::vector<Pair>& pairs) {
        if (pair != pairs.end() && pair->peer == traffic.peer) {
          first = std::min(first, pair->first);
          last = std::max(last, pair->last);
          ++pair;
        }
      };
      take(in, in_);
      take(out, out_);
      traffic.start_seconds = std::chrono::duration<double>(first - started_).count();
      traffic.end_seconds = std::chrono::duration<double>(last - started_).count();
    }
  }

  /// Everything of a stage, in whatever order it can go. What a later stage sends from this rank
  /// has landed here when this returns.
  void run_stage(std::size_t stage, Deadline deadline) {
    const bool bypass_cache = bytes_ >= kBypassBytes;
    const std::string& phase = phases_[stage];
    world_->check(phase);
    for (const Region& region : copies_[stage]) {
      copy_region(region.copy, memory_.address(region.from), memory_.address(region.to),
                  bypass_cache, memory_.scales_of(region).data);
    }
    while (true) {
      const std::uint32_t seen = front_.head().bell.rings.load();
      bool moved = false;
      awaited_.clear();
      for (Pair& pair : in_) {
        moved = unpack(pair, stage, bypass_cache) || moved;
      }
      for (Pair& pair : out_) {
        moved = pack(pair, stage) || moved;
      }
      if (awaited_.empty() && !moved) {
        return;
      }
      if (moved) {
        world_->beat();
        world_->check(phase);
      } else {
        world_->wait(front_.head().bell, seen, phase, awaited_, deadline);
      }
    }
  }

  /// Fills one slot, if one is free. @return whether it did.
  bool pack(Pair& pair, std::size_t stage) {
    if (pair.next == pair.packed.stage_end(stage)) {
      return false;
    }
    if (pair.moved - pair.ring->emptied.load(std::memory_order_acquire) == kSlots) {
      awaited_.push_back(pair.peer);
      return false;
    }
    pair.begin_chunk();
    pair.packed.pack(pair.next, pair.slot());
    pair.ring->versions[pair.moved % kSlots] = report_.version;
    pair.end_chunk();
    pair.ring->filled.store(++pair.moved, std::memory_order_release);
    pair.bell->ring();
    return true;
  }

  /// Empties one slot, if one is full. @return whether it did.
  bool unpack(Pair& pair, std::size_t stage, bool bypass_cache) {
    if (pair.next == pair.packed.stage_end(stage)) {
      return false;
    }
    if (pair.ring->filled.load(std::memory_order_acquire) == pair.moved) {
      awaited_.push_back(pair.peer);
      return false;
    }
    const std::uint64_t version = pair.ring->versions[pair.moved % kSlots];
    if (version != report_.version) {
      abort();
      throw TransportError(Errc::peer_lost, "loopback: rank " + std::to_string(pair.peer) +
                                                " is in the round of version " +
                                                std::to_string(version) + ", rank " +
                                                std::to_string(rank_) + " in that of version " +
                                                std::to_string(report_.version));
    }
    pair.begin_chunk();
    pair.packed.unpack(pair.next, pair.slot(), bypass_cache);
    pair.end_chunk();
    pair.ring->emptied.store(++pair.moved, std::memory_order_release);
    pair.bell->ring();
    return true;
  }

  Rank rank_;
  RankMemory memory_;
  std::vector<std::vector<Region>> copies_;  // [stage]
  std::vector<std::string> phases_;          // [stage]
  std::uint64_t bytes_ = 0;                  // that a round writes here
  Descriptor segment_;
  Descriptor world_segment_;
  Front front_;
  std::map<Rank, Front> fronts_;
  std::optional<SharedWorld> world_;
  std::vector<Pair> in_;
  std::vector<Pair> out_;
  std::vector<Rank> awaited_;
  bool running_ = false;
  Clock::time_point started_;
  RoundReport report_;
};

}  // namespace

void connect_processes(Group& group, Deadline deadline) {
  const std::vector<std::string> machines =
      group.all_gather("loopback connect", machine_id(), deadline);
  std::string elsewhere;
  for (std::size_t rank = 1; rank < machines.size(); ++rank) {
    if (machines[rank] != machines[0]) {
      elsewhere += (elsewhere.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (!elsewhere.empty()) {
    throw TransportError(Errc::unavailable,
                         "transport 'loopback' needs all ranks on one machine, in one process "
                         "namespace; elsewhere than rank 0: " +
                             elsewhere + "; take transport 'ucx' or 'nccl' between machines");
  }
}

std::unique_ptr<Session> prepare_in_processes(Group& group, const Program& program,
                                              const Buffers& buffers, Deadline deadline) {
  auto session = std::make_unique<ProcessSession>(program, buffers);
  Address mine;
  const auto offer_error = error_of([&] { mine = session->offer(program, group.size()); });
  const auto texts = group.all_gather("loopback offer", mine.text(), deadline);
  std::vector<Address> all;
  for (const std::string& text : texts) {
    all.push_back(Address::parse(text));
  }
  agree(group, "loopback offered", offer_error, deadline);
  agree(group, "loopback prepare", error_of([&] { session->open(program, all); }), deadline);
  session->close_descriptors();
  return session;
}

}  // namespace m2n::loopback
