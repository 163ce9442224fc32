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

/// Chunks on their way at a time.
constexpr std::size_t kStagingSlots = 8;
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

void Moved::add_to(PeerTraffic& traffic, Clock::time_point start) const {
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
