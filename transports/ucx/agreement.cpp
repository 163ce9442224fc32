// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// How a session's ranks agree on the way of each pair: the sender says what it can, the receiver
/// answers with keys, and a sender that was offered the direct way says whether it takes it.

#include <algorithm>
#include <chrono>

#include "core/error.hpp"
#include "transports/ucx/session.hpp"

namespace m2n::ucx {
namespace {

constexpr std::uint64_t kSmallestSlot = 4 << 10;

}  // namespace

/// Senders have said by now what their memory is.
void UcxSession::make_rings() {
  if (ring_count_ == 0) {
    return;
  }
  bool device = device_.has_value();
  for (const Neighbor* neighbor : ins_) {
    device = device || (*neighbor->route & kRouteDevice) != 0;
  }
  const std::uint64_t all = device ? options_.device_ring_bytes : options_.ring_bytes;
  const std::uint64_t most = device ? options_.device_slot_bytes : options_.slot_bytes;
  const std::uint64_t share = all / Ring::kSlots / ring_count_;
  slot_bytes_ = std::clamp(share / kSmallestSlot * kSmallestSlot, kSmallestSlot,
                           std::max(kSmallestSlot, most));
  rings_ = RegisteredMemory(worker_->context(), ring_count_ * Ring::bytes(slot_bytes_));
  for (std::uint64_t i = 0; i < ring_count_; ++i) {
    new (rings_.data() + i * Ring::bytes(slot_bytes_)) Ring{};
  }
}

bool UcxSession::all_routes_are_here() {
  for (const Neighbor* neighbor : ins_) {
    if (!neighbor->route) {
      awaited_.push_back(neighbor->peer->rank);
    }
  }
  return awaited_.empty();
}

bool UcxSession::all_keys_are_here() {
  for (const Neighbor* neighbor : outs_) {
    if (neighbor->keys.empty()) {
      awaited_.push_back(neighbor->peer->rank);
    }
  }
  return awaited_.empty();
}

/// Of those that were offered the direct way.
bool UcxSession::all_answers_are_here() {
  for (const Neighbor* neighbor : ins_) {
    if (neighbor->in->way.direct && (*neighbor->route & kRouteFinal) == 0) {
      awaited_.push_back(neighbor->peer->rank);
    }
  }
  return awaited_.empty();
}

void UcxSession::connect(const Program& program, Deadline deadline) {
  static const std::string kPhase = "prepare";
  const CurrentDevice current(device_);
  Lock lock(worker_->mutex());
  waiting_ = true;
  round_ = 1;  // of which the end is that everyone is connected
  try {
    for (auto& [rank, neighbor] : neighbors_) {
      neighbor.peer = &worker_->peer(rank);
    }
    require_fast_lanes();
    const auto sends = by_peer(program.sends, &Region::to);
    const bool device_puts = device_ && register_device(sends, &Region::from, source_zones_);
    for (const auto& [rank, regions] : sends) {
      Neighbor& neighbor = neighbors_.at(rank);
      const bool puts =
          device_ ? device_puts && neighbor.peer->has_device_lane()
                  : options_.puts == PutChoice::on ||
                        (options_.puts == PutChoice::automatic && neighbor.peer->has_put_lane());
      std::uint64_t put_bytes = 0;
      if (puts && !device_ && !neighbor.peer->shares_memory) {
        put_bytes = put_bytes_to(neighbor, regions, deadline);
        add_zones(regions, &Region::from, memory_, wire_way(put_bytes), source_zones_);
      }
      tell(neighbor, Kind::route, (puts ? kRoutePuts : 0) | (device_ ? kRouteDevice : 0),
           {reinterpret_cast<const char*>(&put_bytes), sizeof(put_bytes)});
    }
    if (!device_) {
      source_zones_.register_all(worker_->context(), MemorySpace::host);
    }
    drive(lock, kPhase, deadline, &UcxSession::all_routes_are_here);
    answer_routes(program);
    drive(lock, kPhase, deadline, &UcxSession::all_keys_are_here);
    take_keys(program);
    drive(lock, kPhase, deadline, &UcxSession::all_answers_are_here);
    take_answers(program);
    if (device_) {
      compile_device();
    }
    drive(lock, kPhase, deadline, &UcxSession::end_round);
  } catch (const Error& error) {
    if (has_failed()) {
      throw;  // everyone knows
    }
    give_up(error.code(), "rank " + std::to_string(rank_) + ": " + error.what());
    fail(lock, kPhase);
  }
  describe_paths();
  waiting_ = false;
}

Way UcxSession::wire_way(std::uint64_t put_bytes) const {
  return {.ring = false, .chunk_bytes = options_.chunk_bytes, .put_bytes = put_bytes};
}

std::uint64_t UcxSession::put_bytes_to(const Neighbor& neighbor, const PairRegions& regions,
                                       Deadline deadline) {
  if (options_.put_bytes) {
    return *options_.put_bytes;
  }
  if (!has_rows_between(regions, kLeastPut, 2 * kMostPut)) {
    return kUnmeasuredPut;  // makes no difference
  }
  return worker_->measured_put_bytes(*neighbor.peer, options_.chunk_bytes, [this, deadline] {
    return has_failed() || aborted_ || std::chrono::steady_clock::now() >= deadline;
  });
}

void UcxSession::answer_routes(const Program& program) {
  const auto receives = by_peer(program.receives, &Region::from);
  make_rings();
  const bool device_puts = device_ && register_device(receives, &Region::to, destination_zones_);
  std::byte* ring = rings_.data();
  for (const auto& [rank, regions] : receives) {
    Neighbor& neighbor = neighbors_.at(rank);
    if (neighbor.peer->shares_memory) {
      const Way way{.ring = true,
                    .chunk_bytes = slot_bytes_,
                    .direct = device_puts && takes_device_puts(neighbor)};
      auto* const here = reinterpret_cast<Ring*>(ring);
      ring += Ring::bytes(slot_bytes_);
      if (way.direct) {  // unless the sender says no
        neighbor.in.emplace();
        neighbor.in->way = way;
        neighbor.in->ring = here;
        continue;
      }
      neighbor.in =
          compile_incoming(regions, program.stage_count, memory_, way, here, unpacker_.get());
    } else {
      const Way way = wire_way(!device_ && *neighbor.route == kRoutePuts ? neighbor.put_bytes : 0);
      neighbor.in =
          compile_incoming(regions, program.stage_count, memory_, way, nullptr, unpacker_.get());
      if (!device_) {
        add_zones(regions, &Region::to, memory_, way, destination_zones_);
      }
    }
  }
  if (!device_) {
    destination_zones_.register_all(worker_->context(), MemorySpace::host);
  }
  const std::string ring_key = rings_.bytes() > 0 ? rings_.key() : "";
  for (const auto& [rank, regions] : receives) {
    Neighbor& neighbor = neighbors_.at(rank);
    tell(neighbor, Kind::keys, 0,
         keys_for(regions, memory_, *neighbor.in, destination_zones_, ring_key).text());
  }
}

std::string UcxSession::host_puts(const Neighbor& neighbor) {
  std::string text;
  const std::uint64_t out = neighbor.out ? neighbor.out->way.put_bytes : 0;
  const std::uint64_t in = neighbor.in ? neighbor.in->way.put_bytes : 0;
  for (const std::uint64_t bytes : {out, in == out ? 0 : in}) {
    text += bytes > 0 ? ", puts from " + std::to_string(bytes) + " bytes" : "";
  }
  return text + (out > 0 && in > 0 && in != out ? " there" : "");
}

void UcxSession::take_keys(const Program& program) {
  for (const auto& [rank, regions] : by_peer(program.sends, &Region::to)) {
    Neighbor& neighbor = neighbors_.at(rank);
    const Keys keys = Keys::parse(neighbor.keys);
    neighbor.keys.clear();
    const auto compile = [&, &regions = regions](const Keys& taken) {
      neighbor.out = compile_outgoing(regions, program.stage_count, memory_, options_,
                                      source_zones_, taken, neighbor.peer->endpoint, packer_.get());
    };
    if (!keys.direct) {
      compile(keys);
      continue;
    }
    try {
      compile(keys);
    } catch (const TransportError&) {
      compile(keys.staged());  // memory of a kind that UCX cannot map
    }
    tell(neighbor, Kind::route,
         kRoutePuts | kRouteDevice | kRouteFinal | (neighbor.out->way.direct ? kRouteDirect : 0));
  }
}

void UcxSession::take_answers(const Program& program) {
  for (const auto& [rank, regions] : by_peer(program.receives, &Region::from)) {
    Neighbor& neighbor = neighbors_.at(rank);
    Way way = neighbor.in->way;
    if (way.direct) {
      way.direct = (*neighbor.route & kRouteDirect) != 0;
      neighbor.in = compile_incoming(regions, program.stage_count, memory_, way,
                                     way.direct ? nullptr : neighbor.in->ring, unpacker_.get());
    }
  }
}

void UcxSession::describe_paths() {
  for (PeerTraffic& traffic : report_.peers) {
    const Neighbor& neighbor = neighbors_.at(traffic.peer);
    traffic.path = neighbor.peer->shares_memory ? "ring" : "wire";
    if (device_) {
      traffic.path = device_path(neighbor);
    } else if (!neighbor.peer->shares_memory) {
      traffic.path += host_puts(neighbor);
    }
    traffic.path += " (" + neighbor.peer->lanes() + ")";
  }
}

}  // namespace m2n::ucx
