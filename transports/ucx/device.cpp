// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Memory on a device: the device packs into slots of rings and of the wire's staging, and unpacks
/// from them, several slots at a time, while this rank goes on with its round.

#include <algorithm>

#include "core/error.hpp"
#include "transports/ucx/session.hpp"

namespace m2n::ucx {
namespace {

bool is_all_on_device(const Buffers& buffers) {
  const auto on_device = [](const LocalBuffer& buffer) {
    return buffer.data == nullptr || buffer.space == MemorySpace::device;
  };
  return std::all_of(buffers.source.begin(), buffers.source.end(), on_device) &&
         std::all_of(buffers.destination.begin(), buffers.destination.end(), on_device);
}

}  // namespace

void UcxSession::open_device(const Program& program) {
  const Memory& memory = memory_of(MemorySpace::device);
  if (program.scratch_bytes > 0) {
    memory_.device_scratch_owner = memory.reserve(program.scratch_bytes, *device_);
    memory_.device_scratch = memory_.device_scratch_owner->take(program.scratch_bytes);
  }
  packer_ = memory.copy_queue(*device_);
  unpacker_ = memory.copy_queue(*device_);
  for (const std::vector<Region>& regions : copies_) {
    std::vector<PlacedCopy> copies;
    copies.reserve(regions.size());
    for (const Region& region : regions) {
      copies.push_back({region.copy, memory_.place(region.from), memory_.place(region.to),
                        memory_.scales_of(region)});
    }
    copy_lists_.push_back(unpacker_->add_copies(copies));
  }
  if (staging_memory_) {
    staging_pin_ = memory.pin({staging_memory_->data(), staging_memory_->bytes()});
  }
}

void UcxSession::compile_device() {
  if (std::any_of(ins_.begin(), ins_.end(),
                  [](const Neighbor* neighbor) { return neighbor->in->ring != nullptr; })) {
    rings_pin_ = memory_of(MemorySpace::device).pin({rings_.data(), rings_.bytes()});
  }
  for (Neighbor* neighbor : outs_) {
    Outgoing& out = *neighbor->out;
    if (out.ring != nullptr) {
      out.ring_pin = memory_of(MemorySpace::device)
                         .pin({reinterpret_cast<std::byte*>(out.ring),
                               static_cast<std::size_t>(Ring::bytes(out.way.chunk_bytes))});
    }
  }
  packer_->compile();
  unpacker_->compile();
}

void UcxSession::require_fast_lanes() const {
  if (!device_ || options_.slow_lanes) {
    return;
  }
  for (const auto* neighbors : {&outs_, &ins_}) {
    for (const Neighbor* neighbor : *neighbors) {
      const Peer& peer = *neighbor->peer;
      if (!peer.shares_memory && !peer.has_fast_lane()) {
        throw Error(Errc::unavailable, "memory of device " + std::to_string(*device_) +
                                           " would travel between ranks " + std::to_string(rank_) +
                                           " and " + std::to_string(peer.rank) +
                                           " over slow lanes (" + peer.lanes() +
                                           "), expected InfiniBand or RoCE, or slow_lanes allow");
      }
    }
  }
}

bool UcxSession::fill_slots_by_device(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  Ring& ring = *out.ring;
  SlotsUnderWay& under_way = neighbor.packing;
  const std::size_t end = out.packed.stage_end(stage_);
  while (neighbor.filled < under_way.begun &&
         packer_->is_done(under_way.tickets[neighbor.filled % Ring::kSlots])) {
    ring.filled = ++neighbor.filled;
    if (ring.receiver_sleeps.exchange(0) != 0) {
      tell(neighbor, Kind::wake);
    }
    neighbor.sent.end();
  }
  while (neighbor.next_chunk < end && under_way.begun - ring.emptied < Ring::kSlots) {
    neighbor.sent.begin();
    under_way.tickets[under_way.begun % Ring::kSlots] = packer_->run(
        out.lists[neighbor.next_chunk++], ring.slot(under_way.begun, out.way.chunk_bytes));
    ++under_way.begun;
  }
  const bool idle = neighbor.filled == under_way.begun;
  moved_ = moved_ || !idle;  // nobody wakes whoever waits for a device
  return neighbor.next_chunk == end && idle;
}

void UcxSession::empty_slots_by_device(Neighbor& neighbor, std::size_t end) {
  const Incoming& in = *neighbor.in;
  Ring& ring = *in.ring;
  SlotsUnderWay& under_way = neighbor.unpacking;
  std::uint64_t& done = neighbor.chunks_done[stage_];
  while (neighbor.emptied < under_way.begun &&
         unpacker_->is_done(under_way.tickets[neighbor.emptied % Ring::kSlots])) {
    ++done;
    ring.emptied = ++neighbor.emptied;
    if (ring.sender_sleeps.exchange(0) != 0) {
      tell(neighbor, Kind::wake);
    }
    neighbor.received.end();
  }
  const auto next = [&] {
    return in.packed.stage_begin(stage_) + done + (under_way.begun - neighbor.emptied);
  };
  while (next() < end && under_way.begun < ring.filled) {
    neighbor.received.begin();
    const CopyQueue::List list = in.lists[next()];
    under_way.tickets[under_way.begun % Ring::kSlots] =
        unpacker_->run(list, ring.slot(under_way.begun, in.way.chunk_bytes));
    ++under_way.begun;
  }
  moved_ = moved_ || neighbor.emptied < under_way.begun;
}

bool UcxSession::send_chunks_by_device(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  const std::size_t end = out.packed.stage_end(stage_);
  bool idle = true;
  for (const auto& slot : staging_) {
    if (slot->packed_for == nullptr && slot->pending.operations == 0 && neighbor.next_chunk < end) {
      neighbor.sent.begin();
      slot->chunk = neighbor.next_chunk++;
      slot->ticket = packer_->run(out.lists[slot->chunk], slot->data);
      slot->packed_for = &neighbor;
    }
    if (slot->packed_for == &neighbor) {
      if (packer_->is_done(slot->ticket)) {
        slot->packed_for = nullptr;
        send_slot(neighbor, slot->chunk, *slot);
      } else {
        idle = false;
      }
    }
  }
  moved_ = moved_ || !idle;
  return neighbor.next_chunk == end && idle;
}

/// The message is gone when its receiver returns, so this waits.
void UcxSession::unpack_by_device(CopyQueue::List list, std::span<const std::byte> payload) {
  const CopyQueue::Ticket ticket =
      unpacker_->run(list, const_cast<std::byte*>(payload.data()));  // NOLINT: read alone
  while (!unpacker_->is_done(ticket)) {
  }
}

void UcxSession::copy_stage() {
  if (device_) {
    copies_ticket_ = unpacker_->run(copy_lists_[stage_], nullptr);
    return;
  }
  for (const Region& region : copies_[stage_]) {
    copy_region(region.copy, memory_.address(region.from), memory_.address(region.to),
                bypass_cache_, memory_.scales_of(region).data);
  }
}

bool UcxSession::copies_are_done() {
  if (!device_ || unpacker_->is_done(copies_ticket_)) {
    return true;
  }
  moved_ = true;
  return false;
}

void UcxSession::finish_device() noexcept {
  for (const auto* queue : {&packer_, &unpacker_}) {
    try {
      if (*queue) {
        (*queue)->finish();
      }
    } catch (const std::exception&) {
      continue;  // a device that has failed touches nothing any more
    }
  }
}

bool UcxSession::takes_device_puts(const Neighbor& neighbor) const {
  constexpr std::uint64_t kBoth = kRoutePuts | kRouteDevice;
  return neighbor.peer->has_device_lane() && (*neighbor.route & kBoth) == kBoth;
}

bool UcxSession::register_device(const std::map<Rank, PairRegions>& pairs, Endpoint Region::*end,
                                 Zones& zones) {
  if (options_.puts == PutChoice::off || !worker_->context()->knows_devices() ||
      !is_all_on_device(memory_.buffers)) {
    return false;
  }
  const Way way{.direct = true};
  for (const auto& [rank, regions] : pairs) {
    const Neighbor& neighbor = neighbors_.at(rank);
    if (end == &Region::from ? neighbor.peer->has_device_lane() : takes_device_puts(neighbor)) {
      add_zones(regions, end, memory_, way, zones);
    }
  }
  try {
    zones.register_all(worker_->context(), MemorySpace::device);
  } catch (const Error&) {
    zones = {};  // memory of a kind that UCX cannot lend: staged
    return false;
  }
  return true;
}

std::string UcxSession::device_path(const Neighbor& neighbor) const {
  const auto& in = neighbor.in;
  const auto& out = neighbor.out;
  std::string path = (in && in->way.direct) || (out && out->way.direct) ? "direct" : "";
  if ((in && !in->way.direct) || (out && !out->way.direct)) {
    const bool ring = neighbor.peer->shares_memory;
    const bool pinned =
        ring ? (!in || in->way.direct || rings_pin_) && (!out || out->way.direct || out->ring_pin)
             : !out || staging_pin_;
    path += std::string(path.empty() ? "" : " and ") + (ring ? "ring" : "wire") +
            (pinned ? " staged through pinned memory" : " staged through host memory");
  }
  return path;
}

}  // namespace m2n::ucx
