// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/session.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.hpp"

namespace m2n::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Chunks on their way at a time.
constexpr std::size_t kStagingSlots = 8;
constexpr std::uint64_t kSmallestSlot = 4 << 10;
/// Rounds larger than any last-level cache are written past it: nobody reads the bytes soon.
constexpr std::uint64_t kBypassBytes = 64 << 20;

}  // namespace

UcxSession::UcxSession(std::shared_ptr<Worker> worker, std::uint32_t number,
                       const UcxOptions& options, const Program& program, const Buffers& buffers,
                       Rank size)
    : worker_(std::move(worker)),
      number_(number),
      options_(options),
      rank_(program.rank),
      size_(size),
      copies_(program.stage_count),
      report_(expected_report(program, "ucx")) {
  memory_.buffers = buffers;
  device_ = device_of("transport 'ucx'", buffers);
  if (!device_) {
    memory_.scratch.resize(program.scratch_bytes);
  }
  for (std::uint32_t stage = 0; stage < program.stage_count; ++stage) {
    phases_.push_back("stage " + std::to_string(stage));
  }
  for (const Region& region : program.copies) {
    copies_[region.stage].push_back(region);
  }
  std::uint64_t bytes = 0;
  for (const auto* regions : {&program.receives, &program.copies}) {
    for (const Region& region : *regions) {
      bytes += region.bytes;
    }
  }
  bypass_cache_ = bytes >= kBypassBytes;
}

UcxSession::~UcxSession() {
  const CurrentDevice current(device_);
  if (running_) {
    abort();
  }
  const Lock lock(worker_->mutex());
  finish_device();
  round_ += told_failure_ ? 0 : 1;  // the one before is over
  tell_all(Kind::left);
  settle(kLeaveLimit, [this] { return worker_->unsent() == 0; });
  worker_->remove(number_);
  bool busy = false;
  for (const auto& [rank, neighbor] : neighbors_) {
    busy = busy || neighbor.puts.operations + neighbor.flush.operations > 0;
  }
  for (const auto& slot : staging_) {
    busy = busy || slot->pending.operations > 0;
  }
  if (busy) {
    // A lost peer holds them up; what they use outlives the session.
    struct Remains {
      RegisteredMemory rings;
      std::unique_ptr<RegisteredMemory> staging_memory;
      std::vector<std::unique_ptr<StagingSlot>> staging;
      std::array<std::shared_ptr<void>, 2> pins;
      Zones zones;
      std::map<Rank, Neighbor> neighbors;
    };
    worker_->keep(std::make_shared<Remains>(Remains{std::move(rings_),
                                                    std::move(staging_memory_),
                                                    std::move(staging_),
                                                    {rings_pin_, staging_pin_},
                                                    std::move(source_zones_),
                                                    std::move(neighbors_)}));
  }
  neighbors_.clear();  // their keys go under the lock
}

void UcxSession::open(const Program& program) {
  const CurrentDevice current(device_);
  const Lock lock(worker_->mutex());
  bool wire = false;
  for (const auto& [rank, regions] : by_peer(program.receives, &Region::from)) {
    ring_count_ += worker_->shares_memory_with(rank) ? 1 : 0;
    Neighbor& neighbor = neighbors_[rank];
    neighbor.puts_done.resize(program.stage_count);
    neighbor.chunks_done.resize(program.stage_count);
    ins_.push_back(&neighbor);
  }
  for (const auto& [rank, regions] : by_peer(program.sends, &Region::to)) {
    wire = wire || !worker_->shares_memory_with(rank);
    outs_.push_back(&neighbors_[rank]);
  }
  for (Rank rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && (rank == kRoot || rank_ == kRoot)) {
      neighbors_[rank];
    }
  }
  if (wire) {
    staging_memory_ = std::make_unique<RegisteredMemory>(worker_->context(),
                                                         kStagingSlots * options_.chunk_bytes);
    for (std::size_t i = 0; i < kStagingSlots; ++i) {
      staging_.push_back(std::make_unique<StagingSlot>());
      staging_.back()->data = staging_memory_->data() + i * options_.chunk_bytes;
    }
  }
  if (device_) {
    open_device(program);
  }
  awaited_.reserve(neighbors_.size());
  worker_->add(number_, this);
}

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
    return has_failed() || aborted_ || Clock::now() >= deadline;
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

Header UcxSession::header(Kind kind, std::uint64_t value) const {
  return {.session = number_, .kind = kind, .from = rank_, .round = round_, .value = value};
}

void UcxSession::tell(Neighbor& neighbor, Kind kind, std::uint64_t value, std::string_view text) {
  if (neighbor.peer != nullptr) {
    worker_->send(*neighbor.peer, header(kind, value), text);
  }
}

void UcxSession::tell_all(Kind kind, std::uint64_t value, std::string_view text) {
  for (auto& [rank, neighbor] : neighbors_) {
    tell(neighbor, kind, value, text);
  }
}

void UcxSession::receive(const Header& header, std::span<const std::byte> payload) {
  const auto found = neighbors_.find(header.from);
  if (found == neighbors_.end()) {
    return;  // of another plan; prepare has told
  }
  Neighbor& from = found->second;
  over_ = std::max(over_, header.round - 1);  // which the sender would not have left otherwise
  const auto text = [&] {
    return std::string(reinterpret_cast<const char*>(payload.data()), payload.size());
  };
  switch (header.kind) {
    case Kind::route:
      from.route = header.value;
      if (payload.size() == sizeof(from.put_bytes)) {
        std::memcpy(&from.put_bytes, payload.data(), sizeof(from.put_bytes));
      }
      break;
    case Kind::keys:
      from.keys = text();
      break;
    case Kind::ready:
      from.begun = header.round;
      from.version = header.value;
      from.open_stage = 0;
      break;
    case Kind::open:
      from.open_stage = header.value;
      break;
    case Kind::wake:
      break;
    case Kind::data:
      receive_chunk(from, header, payload);
      break;
    case Kind::put_done:
      if (header.value < from.puts_done.size()) {
        from.puts_done[header.value] = header.round;
      }
      break;
    case Kind::finished:
      from.finished = header.round;
      from.version = header.value;
      break;
    case Kind::over:
      over_ = header.round;
      break;
    case Kind::waiting:
      news_ = text();
      break;
    case Kind::failed:
      from.quiet = true;
      if (!failure_) {
        failure_ = {Errc::peer_lost, text(), header.round};
      }
      break;
    case Kind::left:
      from.left = true;
      break;
  }
}

void UcxSession::receive_chunk(Neighbor& neighbor, const Header& header,
                               std::span<const std::byte> payload) {
  // Sent because this rank has begun the round, so it may be written.
  if (!running_ || has_failed() || header.round != round_ || !neighbor.in ||
      header.value >= neighbor.in->packed.chunk_count()) {
    return;
  }
  const std::uint64_t bytes = neighbor.in->packed.chunk_bytes(header.value);
  if (payload.size() != bytes) {
    give_up(Errc::peer_lost, "rank " + std::to_string(header.from) + " sent " +
                                 std::to_string(payload.size()) + " bytes instead of " +
                                 std::to_string(bytes));
    return;
  }
  neighbor.received.begin();
  if (device_) {
    unpack_by_device(neighbor.in->lists[header.value], payload);
  } else {
    neighbor.in->packed.unpack(header.value, payload.data(), bypass_cache_);
  }
  neighbor.received.end();
  ++neighbor.chunks_done[neighbor.in->packed.stage_of(header.value)];
}

void UcxSession::Moved::add_to(PeerTraffic& traffic, Clock::time_point start) const {
  if (first_) {  // fmin() and fmax() take a number before a NaN
    const auto since = [&](Clock::time_point at) {
      return std::chrono::duration<double>(at - start).count();
    };
    traffic.start_seconds = std::fmin(traffic.start_seconds, since(*first_));
    traffic.end_seconds = std::fmax(traffic.end_seconds, since(last_));
  }
}

void UcxSession::start(std::uint64_t version, Deadline) {
  const CurrentDevice current(device_);
  const Lock lock(worker_->mutex());
  report_.version = version;
  started_ = Clock::now();
  running_ = true;
  ++round_;
  for (auto& [rank, neighbor] : neighbors_) {
    neighbor.next_chunk = 0;
    neighbor.next_put = 0;
    neighbor.sent.reset();
    neighbor.received.reset();
    std::fill(neighbor.chunks_done.begin(), neighbor.chunks_done.end(), 0);
  }
  tell_all(Kind::ready, version);
}

RoundReport UcxSession::wait(Deadline deadline) {
  static const std::string kPhase = "round end";
  const CurrentDevice current(device_);
  Lock lock(worker_->mutex());
  waiting_ = true;
  for (stage_ = 0; stage_ < copies_.size(); ++stage_) {
    if (has_failed() || aborted_) {
      fail(lock, phases_[stage_]);
    }
    copy_stage();
    open_stage();
    drive(lock, phases_[stage_], deadline, &UcxSession::run_stage);
  }
  drive(lock, kPhase, deadline, &UcxSession::end_round);
  waiting_ = false;
  running_ = false;
  for (PeerTraffic& traffic : report_.peers) {
    traffic.start_seconds = traffic.end_seconds = std::numeric_limits<double>::quiet_NaN();
    const Neighbor& neighbor = neighbors_.at(traffic.peer);
    neighbor.sent.add_to(traffic, started_);
    neighbor.received.add_to(traffic, started_);
  }
  report_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  return report_;
}

std::optional<std::uint64_t> UcxSession::extra_bytes() const {
  std::uint64_t bytes = rings_.bytes() + memory_.scratch.size() + memory_.device_scratch.bytes;
  bytes += staging_memory_ ? staging_memory_->bytes() : 0;
  for (const auto* queue : {&packer_, &unpacker_}) {
    bytes += *queue ? (*queue)->extra_bytes() : 0;
  }
  return bytes;
}

void UcxSession::abort() noexcept {
  aborted_ = true;
  worker_->signal();
  const CurrentDevice current(device_);
  const Lock lock(worker_->mutex());
  if (waiting_ || told_failure_) {
    return;  // wait() tells
  }
  try {
    round_ += running_ ? 0 : 1;  // the one before is over
    give_up(Errc::peer_lost, "rank " + std::to_string(rank_) + " gave up");
    tell_all(Kind::failed, 0, failure_->text);
    told_failure_ = true;
    settle(kLeaveLimit, [this] { return worker_->unsent() == 0; });
  } catch (const std::exception&) {
    return;  // the others have deadlines
  }
}

}  // namespace m2n::ucx
