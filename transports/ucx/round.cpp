// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The steps of a round, and how it fails.

#include <algorithm>

#include "core/error.hpp"
#include "transports/ucx/session.hpp"

namespace m2n::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

/// How long a rank sleeps before it looks whether the others are alive.
constexpr milliseconds kSlice{100};
/// For own puts to complete, and for peers to say that theirs have, after a failure.
constexpr milliseconds kQuietLimit{1'000};
/// For a lost link to be explained by somebody else.
constexpr milliseconds kGrace{200};
/// Puts between two looks at what has arrived.
constexpr std::size_t kPutsAtATime = 64;

std::string list(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

}  // namespace

void UcxSession::drive(Lock& lock, const std::string& phase, Deadline deadline,
                       bool (UcxSession::*step)()) {
  Deadline idle_since = Clock::now();
  bool announced = false;
  const auto announce = [&](bool sleeps) {
    if (sleeps != announced) {
      announce_sleep(sleeps);
      announced = sleeps;
    }
  };
  while (true) {
    moved_ = worker_->progress();
    if (has_failed() || aborted_) {
      fail(lock, phase);
    }
    awaited_.clear();
    if ((this->*step)()) {
      announce(false);
      return;
    }
    const Deadline now = Clock::now();
    if (now >= deadline) {
      give_up(Errc::timed_out, "the deadline passed; ranks missing: " + missing());
    }
    look_for_lost(false);
    if (moved_ || has_failed()) {
      announce(false);
      idle_since = now;
      continue;
    }
    if (now - idle_since < options_.spin) {
      continue;
    }
    if (!announced) {
      announce(true);  // and look once more
      continue;
    }
    if (!worker_->arm()) {
      continue;
    }
    lock.unlock();
    const bool woken = worker_->sleep(std::min<nanoseconds>(kSlice, deadline - now));
    lock.lock();
    if (!woken) {
      look_for_lost(true);
      send_news();
    }
  }
}

void UcxSession::announce_sleep(bool sleeps) {
  for (Neighbor* neighbor : ins_) {
    if (neighbor->in && neighbor->in->ring != nullptr) {
      neighbor->in->ring->receiver_sleeps = sleeps ? 1 : 0;
    }
  }
  for (Neighbor* neighbor : outs_) {
    if (neighbor->out && neighbor->out->ring != nullptr) {
      neighbor->out->ring->sender_sleeps = sleeps ? 1 : 0;
    }
  }
}

void UcxSession::open_stage() {
  for (Neighbor* neighbor : outs_) {
    neighbor->flushing = false;
    neighbor->mapped_begun = false;
    neighbor->told = false;
  }
  // Stages may use the same scratch memory one after the other. A ring is emptied in its stage.
  for (Neighbor* neighbor : ins_) {
    const Incoming& in = *neighbor->in;
    const bool chunks =
        in.ring == nullptr && in.packed.stage_end(stage_) > in.packed.stage_begin(stage_);
    if (stage_ > 0 && (in.has_puts[stage_] || chunks)) {
      tell(*neighbor, Kind::open, stage_);
    }
  }
}

bool UcxSession::run_stage() {
  bool done = copies_are_done();
  for (Neighbor* neighbor : ins_) {
    done = receive_stage(*neighbor) && done;
  }
  for (Neighbor* neighbor : outs_) {
    done = send_stage(*neighbor) && done;
  }
  return done;
}

bool UcxSession::receive_stage(Neighbor& neighbor) {
  const Incoming& in = *neighbor.in;
  const std::size_t begin = in.packed.stage_begin(stage_);
  const std::size_t wanted = in.packed.stage_end(stage_) - begin;
  std::uint64_t& done = neighbor.chunks_done[stage_];
  if (in.ring != nullptr && device_) {
    empty_slots_by_device(neighbor, in.packed.stage_end(stage_));
  } else if (in.ring != nullptr && done < wanted && neighbor.emptied < in.ring->filled) {
    neighbor.received.begin();
    in.packed.unpack(begin + done, in.ring->slot(neighbor.emptied, in.way.chunk_bytes),
                     bypass_cache_);
    neighbor.received.end();
    ++done;
    in.ring->emptied = ++neighbor.emptied;
    if (in.ring->sender_sleeps.exchange(0) != 0) {
      tell(neighbor, Kind::wake);
    }
    moved_ = true;
  }
  if (done == wanted && (!in.has_puts[stage_] || neighbor.puts_done[stage_] == round_)) {
    return true;
  }
  awaited_.push_back(neighbor.peer->rank);
  return false;
}

bool UcxSession::send_stage(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  const bool no_puts = !out.has_puts[stage_];
  if (out.packed.stage_end(stage_) == out.packed.stage_begin(stage_) && no_puts) {
    return true;
  }
  bool done = neighbor.begun >= round_ &&
              ((out.ring != nullptr && no_puts) || neighbor.open_stage >= stage_);
  if (done) {
    check_version(neighbor);
    if (has_failed()) {
      return false;
    }
    done = no_puts || put_rows(neighbor);
    if (out.ring != nullptr) {
      done = (device_ ? fill_slots_by_device(neighbor) : fill_slot(neighbor)) && done;
    } else {
      done = (device_ ? send_chunks_by_device(neighbor) : send_chunk(neighbor)) && done;
    }
  }
  if (!done) {
    awaited_.push_back(neighbor.peer->rank);
  }
  return done;
}

bool UcxSession::fill_slot(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  Ring& ring = *out.ring;
  const std::size_t end = out.packed.stage_end(stage_);
  if (neighbor.next_chunk < end && neighbor.filled - ring.emptied < Ring::kSlots) {
    neighbor.sent.begin();
    out.packed.pack(neighbor.next_chunk, ring.slot(neighbor.filled, out.way.chunk_bytes));
    neighbor.sent.end();
    ++neighbor.next_chunk;
    ring.filled = ++neighbor.filled;
    if (ring.receiver_sleeps.exchange(0) != 0) {
      tell(neighbor, Kind::wake);
    }
    moved_ = true;
  }
  return neighbor.next_chunk == end;
}

bool UcxSession::send_chunk(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  const std::size_t end = out.packed.stage_end(stage_);
  if (neighbor.next_chunk == end) {
    return true;
  }
  const auto free = std::find_if(staging_.begin(), staging_.end(),
                                 [](const auto& slot) { return slot->pending.operations == 0; });
  if (free != staging_.end()) {
    StagingSlot& slot = **free;
    const std::size_t chunk = neighbor.next_chunk++;
    neighbor.sent.begin();
    out.packed.pack(chunk, slot.data);
    send_slot(neighbor, chunk, slot);
  }
  return neighbor.next_chunk == end;
}

void UcxSession::send_slot(Neighbor& neighbor, std::size_t chunk, StagingSlot& slot) {
  worker_->send_data(*neighbor.peer, header(Kind::data, chunk),
                     {slot.data, neighbor.out->packed.chunk_bytes(chunk)}, *staging_memory_,
                     slot.pending);
  neighbor.sent.end();
  moved_ = true;
}

bool UcxSession::put_rows(Neighbor& neighbor) {
  const Outgoing& out = *neighbor.out;
  const std::size_t end = out.put_end[stage_];
  neighbor.sent.begin();
  if (out.way.direct && !neighbor.mapped_begun) {
    neighbor.mapped_ticket = packer_->run(out.mapped_lists[stage_], nullptr);
    neighbor.mapped_begun = true;
  }
  for (std::size_t i = 0;
       i < kPutsAtATime && neighbor.next_put < end && neighbor.puts.bytes < options_.window_bytes;
       ++i) {
    const Put& put = out.puts[neighbor.next_put++];
    worker_->put(*neighbor.peer, {put.source, put.bytes}, source_zones_.zone(put.source_zone),
                 put.address, out.zone_keys[put.zone], neighbor.puts);
    moved_ = true;
  }
  if (neighbor.next_put < end) {
    return false;
  }
  if (!neighbor.flushing) {
    worker_->flush(*neighbor.peer, neighbor.flush);
    neighbor.flushing = true;
  }
  if (neighbor.flush.operations > 0 || neighbor.puts.operations > 0 ||
      (out.way.direct && !packer_->is_done(neighbor.mapped_ticket))) {
    moved_ = moved_ || device_;  // nobody wakes whoever waits for a device
    return false;
  }
  for (const Pending* pending : {&neighbor.puts, &neighbor.flush}) {
    if (pending->status != UCS_OK) {
      give_up(Errc::peer_lost, "a put to rank " + std::to_string(neighbor.peer->rank) +
                                   " failed: " + ucs_status_string(pending->status));
      return false;
    }
  }
  if (!neighbor.told) {
    neighbor.sent.end();
    tell(neighbor, Kind::put_done, stage_);
    neighbor.told = true;
  }
  return true;
}

bool UcxSession::has_unsent() const {
  return worker_->unsent() > 0 ||
         std::any_of(staging_.begin(), staging_.end(),
                     [](const auto& slot) { return slot->pending.operations > 0; });
}

bool UcxSession::end_round() {
  if (ended_ < round_ && rank_ == kRoot) {
    for (const auto& [rank, neighbor] : neighbors_) {
      if (neighbor.finished < round_) {
        awaited_.push_back(rank);
      } else {
        check_version(neighbor);
      }
    }
    if (!awaited_.empty() || has_failed()) {
      return false;
    }
    tell_all(Kind::over);
    over_ = round_;
  } else if (ended_ < round_) {
    tell(neighbors_.at(kRoot), Kind::finished, report_.version);
  }
  ended_ = round_;
  if (over_ < round_) {
    awaited_.push_back(kRoot);
  }
  // Peers must not depend on this rank once it has returned.
  return over_ >= round_ && !has_unsent();
}

void UcxSession::look_for_lost(bool ask_the_kernel) {
  std::vector<Rank> lost;
  bool sure = false;
  for (const Rank rank : awaited_) {
    const Neighbor& neighbor = neighbors_.at(rank);
    const bool known = neighbor.left || neighbor.peer->failure != UCS_OK;
    if (known || (ask_the_kernel && neighbor.peer->is_gone())) {
      lost.push_back(rank);
      sure = sure || !known || neighbor.left;
    }
  }
  if (lost.empty()) {
    lost_since_.reset();
    return;
  }
  // Who loses a peer leaves in turn, and its link may be down before its last words are read: those
  // name the cause.
  const auto now = Clock::now();
  lost_since_ = lost_since_.value_or(now);
  if (sure || now - *lost_since_ >= kGrace) {
    give_up(Errc::peer_lost, (lost.size() == 1 ? "rank " : "ranks ") + list(lost) +
                                 (lost.size() == 1 ? " has" : " have") + " ended or left" +
                                 (sure ? "" : ", or the link is down"));
  }
}

void UcxSession::send_news() {
  if (rank_ == kRoot && !has_failed()) {
    const std::string news = list(awaited_);
    if (news != sent_news_) {
      tell_all(Kind::waiting, 0, news);
      sent_news_ = news;
    }
  }
}

std::string UcxSession::missing() const {
  std::vector<Rank> late;  // that have not begun
  for (const Rank rank : awaited_) {
    if (neighbors_.at(rank).begun < round_) {
      late.push_back(rank);
    }
  }
  if (awaited_.size() == 1 && awaited_[0] == kRoot && !news_.empty()) {
    return news_;
  }
  return list(late.empty() ? awaited_ : late);
}

void UcxSession::give_up(Errc code, const std::string& text) {
  if (!has_failed()) {
    failure_ = {code, text, round_};
  }
}

void UcxSession::check_version(const Neighbor& neighbor) {
  if (neighbor.version != report_.version) {
    give_up(Errc::peer_lost, "rank " + std::to_string(neighbor.peer->rank) +
                                 " is in the round of version " + std::to_string(neighbor.version) +
                                 ", rank " + std::to_string(rank_) + " in that of version " +
                                 std::to_string(report_.version));
  }
}

bool UcxSession::writes_here(const Neighbor& neighbor) const {
  if (neighbor.begun < round_ || neighbor.quiet || neighbor.left || neighbor.peer->is_gone()) {
    return false;
  }
  for (std::size_t stage = 0; stage < neighbor.puts_done.size(); ++stage) {
    if (neighbor.in->has_puts[stage] && neighbor.puts_done[stage] != round_) {
      return true;
    }
  }
  return false;
}

void UcxSession::fail(Lock& lock, const std::string& phase) {
  const std::string me = "rank " + std::to_string(rank_);
  give_up(Errc::peer_lost, me + " gave up");  // unless there is a cause
  finish_device();
  settle(kQuietLimit, [this] {
    return std::none_of(outs_.begin(), outs_.end(), [](const Neighbor* neighbor) {
      return neighbor->puts.operations + neighbor->flush.operations > 0 &&
             !neighbor->peer->is_gone();
    });
  });
  if (!told_failure_) {
    const bool own = failure_->code == Errc::timed_out;
    tell_all(Kind::failed, 0,
             own ? me + " gave up in " + phase + ": " + failure_->text : failure_->text);
    told_failure_ = true;
  }
  settle(kQuietLimit, [this] {
    return std::none_of(ins_.begin(), ins_.end(),
                        [this](const Neighbor* neighbor) { return writes_here(*neighbor); });
  });
  settle(kLeaveLimit, [this] { return worker_->unsent() == 0; });
  waiting_ = false;
  running_ = false;
  lock.unlock();
  throw TransportError(failure_->code, "ucx: in " + phase + ": " + failure_->text);
}

}  // namespace m2n::ucx
