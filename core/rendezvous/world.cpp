// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/world.hpp"

#include <algorithm>
#include <chrono>

#include "core/rendezvous/rank_list.hpp"

namespace m2n {

using wire::Collective;
using wire::Kind;
using wire::Malformed;
using wire::Operation;
using wire::Reader;
using wire::Writer;

namespace {

/// A wait without end in sight; larger ones would overflow the clock.
constexpr std::chrono::hours kLongestWait{24 * 365};

World::Payload payload_of(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

std::string in_phase(const std::string& phase) { return "phase '" + phase + "': "; }

}  // namespace

Refusal refused_join(bool again, Errc code, const std::string& why) {
  return {again, code, in_phase("rendezvous") + why};
}

World::World(Rank size, std::uint64_t epoch, std::uint64_t max_value_bytes, Deliver deliver)
    : epoch_(epoch),
      max_value_bytes_(max_value_bytes),
      deliver_(std::move(deliver)),
      members_(static_cast<std::size_t>(size)) {}

template <class Picked>
std::vector<Rank> World::pick(Picked picked) const {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (picked(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::optional<Refusal> World::refusal(const wire::Hello& hello) const {
  const bool any_epoch = hello.epoch == kCurrentEpoch;
  if (hello.size != size()) {
    return refused_join(false, Errc::bad_argument,
                        "rank " + std::to_string(hello.rank) + " expects " +
                            std::to_string(hello.size) + " ranks in world '" + hello.world +
                            "', which has " + std::to_string(size()));
  }
  if (failure_.has_value()) {
    return Refusal{any_epoch, failure_->code, failure_->text};
  }
  const Member& seat = members_[static_cast<std::size_t>(hello.rank)];
  if (seat.presence != Presence::absent) {
    return refused_join(any_epoch, Errc::bad_argument,
                        "rank " + std::to_string(hello.rank) + " of world '" + hello.world +
                            "' is taken by process " + std::to_string(seat.peer.pid) + " on " +
                            seat.peer.host_name + "; each rank joins once an epoch");
  }
  return std::nullopt;
}

void World::join(const wire::Hello& hello, std::string proof, Deadline now) {
  Member& joining = member(hello.rank);
  joining.presence = Presence::present;
  joining.peer = hello.peer;
  joining.proof = std::move(proof);
  wait(hello.rank, WaitFor::ranks, 0, hello.wait_us, now);
  if (++present_ == size()) {
    welcome_all();
  }
}

void World::welcome_all() {
  complete_ = true;
  const bool one_process = std::all_of(members_.begin(), members_.end(), [&](const Member& each) {
    return each.peer.process == members_.front().peer.process;
  });
  for (Rank rank = 0; rank < size(); ++rank) {
    end_wait(rank);
    Writer writer;
    writer.u64(epoch_).u8(one_process ? 1 : 0).u64(max_value_bytes_).text(member(rank).proof);
    deliver_(rank, Kind::welcome, 0, payload_of(writer.take()));
  }
}

void World::request(Rank rank, const wire::Header& header, std::string_view payload, Deadline now) {
  if (failure_.has_value()) {
    return;  // The rank has been told, and will see it before an answer.
  }
  Member& asking = member(rank);
  if (asking.presence != Presence::present) {
    throw Malformed("a request after the goodbye");
  }
  Reader reader(payload);
  switch (header.kind) {
    case Kind::abort:
      fail(Errc::peer_lost, "rank " + std::to_string(rank) +
                                " gave up: " + std::string(reader.text(kMaxStatementBytes)));
      return;
    case Kind::leave:
      leave(rank, std::string(reader.text(kMaxStatementBytes)));
      return;
    default:
      break;
  }
  if (!complete_ || asking.wait_for != WaitFor::nothing) {
    throw Malformed("a request before the last one was answered");
  }
  switch (header.kind) {
    case Kind::collective:
      collective(rank, header.request, payload, now);
      return;
    case Kind::send:
      send(rank, header.request, reader);
      return;
    case Kind::receive:
      receive(rank, header.request, reader, now);
      return;
    case Kind::peers: {
      reader.end();
      Writer writer;
      for (const Member& each : members_) {
        writer.text(each.peer.host_name).text(each.peer.machine).text(each.peer.memory);
        writer.text(each.peer.process).u64(static_cast<std::uint64_t>(each.peer.pid));
      }
      answer(rank, header.request, writer.take());
      return;
    }
    default:
      keys(rank, header, reader, now);
  }
}

void World::wait(Rank rank, WaitFor what, std::uint64_t request, std::uint64_t wait_us,
                 Deadline now) {
  constexpr auto kLongest =
      static_cast<std::uint64_t>(std::chrono::microseconds(kLongestWait).count());
  Member& waiting = member(rank);
  waiting.wait_for = what;
  waiting.request = request;
  waiting.deadline =
      now + std::chrono::microseconds(static_cast<std::int64_t>(std::min(wait_us, kLongest)));
  deadlines_.emplace(waiting.deadline, rank);
}

void World::end_wait(Rank rank) {
  Member& waiting = member(rank);
  if (waiting.wait_for != WaitFor::nothing) {
    deadlines_.erase({waiting.deadline, rank});
    waiting.wait_for = WaitFor::nothing;
  }
}

void World::reply(Rank rank, const Payload& payload) {
  end_wait(rank);
  deliver_(rank, Kind::reply, member(rank).request, payload);
}

void World::answer(Rank rank, std::uint64_t request, std::string payload) {
  deliver_(rank, Kind::reply, request, payload_of(std::move(payload)));
}

bool World::in_step(Rank rank, const Collective& call, const Gathering& gathering) {
  if (call.operation == gathering.operation && call.phase == gathering.phase &&
      call.root == gathering.root) {
    return true;
  }
  const auto describe = [](Operation operation, const std::string& phase, Rank root) {
    return "phase '" + phase + "' (" + std::string(to_string(operation)) +
           (operation == Operation::broadcast ? " of rank " + std::to_string(root) : "") + ")";
  };
  fail(Errc::peer_lost, "rank " + std::to_string(rank) + " is in " +
                            describe(call.operation, call.phase, call.root) + " while rank " +
                            std::to_string(gathering.first) + " is in " +
                            describe(gathering.operation, gathering.phase, gathering.root) +
                            "; ranks must agree on the order");
  return false;
}

void World::collective(Rank rank, std::uint64_t request, std::string_view payload, Deadline now) {
  const Collective call = wire::decode_collective(payload);
  Member& caller = member(rank);
  if (call.sequence != caller.next_collective || call.root >= size()) {
    throw Malformed("a collective out of order");
  }
  ++caller.next_collective;
  caller.last_phase = call.phase;
  const auto [at, created] = gatherings_.try_emplace(call.sequence);
  Gathering& gathering = at->second;
  if (created) {
    gathering.operation = call.operation;
    gathering.phase = call.phase;
    gathering.root = call.root;
    gathering.first = rank;
    gathering.statements.resize(members_.size());
  } else if (!in_step(rank, call, gathering)) {
    return;
  }
  wait(rank, WaitFor::collective, request, call.wait_us, now);
  caller.collective = call.sequence;
  caller.name = call.phase;
  ++gathering.arrived;
  Statement& statement = gathering.statements[static_cast<std::size_t>(rank)].emplace();
  if (call.operation == Operation::broadcast) {
    if (rank == call.root) {
      gathering.broadcast = payload_of(std::string(call.value));
      reply(rank, payload_of({}));
      for (Rank other = 0; other < size(); ++other) {
        const Member& each = member(other);
        if (each.wait_for == WaitFor::collective && each.collective == call.sequence) {
          reply(other, gathering.broadcast);
        }
      }
    } else if (gathering.broadcast != nullptr) {
      reply(rank, gathering.broadcast);
    }
    settle_broadcast(call.sequence, gathering);
    return;
  }
  statement = {call.failed, std::string(call.value)};
  if (gathering.arrived == size()) {
    finish(call.sequence, gathering);
  } else {
    miss_the_left(gathering);
  }
}

void World::settle_broadcast(std::uint64_t sequence, const Gathering& gathering) {
  if (gathering.broadcast == nullptr && member(gathering.root).presence == Presence::left) {
    fail_left(gathering.phase, {gathering.root});
  } else if (has_all(gathering)) {
    gatherings_.erase(sequence);
  }
}

bool World::has_all(const Gathering& gathering) const {
  return gathering.arrived == size() ||
         (!left_.empty() && std::ranges::all_of(missing(gathering), [&](Rank rank) {
           return members_[static_cast<std::size_t>(rank)].presence == Presence::left;
         }));
}

std::vector<Rank> World::missing(const Gathering& gathering) const {
  return pick(
      [&](Rank rank) { return !gathering.statements[static_cast<std::size_t>(rank)].has_value(); });
}

void World::miss_the_left(const Gathering& gathering) {
  std::vector<Rank> ranks;
  for (const Rank rank : left_) {
    if (!gathering.statements[static_cast<std::size_t>(rank)].has_value()) {
      ranks.push_back(rank);
    }
  }
  if (!ranks.empty()) {
    std::ranges::sort(ranks);
    fail_left(std::string(gathering.phase), ranks);
  }
}

void World::finish(std::uint64_t sequence, Gathering& gathering) {
  Payload payload;
  if (gathering.operation == Operation::agree) {
    std::map<std::pair<bool, std::string_view>, std::vector<Rank>> sides;
    for (Rank rank = 0; rank < size(); ++rank) {
      const Statement& statement = *gathering.statements[static_cast<std::size_t>(rank)];
      sides[{!statement.failed, statement.text}].push_back(rank);
    }
    Verdict verdict;
    for (auto& [key, ranks] : sides) {
      verdict.sides.push_back({{!key.first, std::string(key.second)}, std::move(ranks)});
    }
    std::ranges::sort(verdict.sides, [](const Verdict::Side& a, const Verdict::Side& b) {
      return std::pair(!a.statement.failed, a.ranks.front()) <
             std::pair(!b.statement.failed, b.ranks.front());
    });
    for (std::size_t side = kMaxSides; side < verdict.sides.size(); ++side) {
      verdict.others.insert(verdict.others.end(), verdict.sides[side].ranks.begin(),
                            verdict.sides[side].ranks.end());
    }
    std::ranges::sort(verdict.others);
    verdict.sides.resize(std::min(verdict.sides.size(), kMaxSides));
    payload = payload_of(wire::encode_verdict(verdict));
  } else {
    Writer writer;
    if (gathering.operation == Operation::gather) {
      for (const std::optional<Statement>& statement : gathering.statements) {
        writer.text(statement->text);
      }
    }
    payload = payload_of(writer.take());
  }
  gatherings_.erase(sequence);
  for (Rank rank = 0; rank < size(); ++rank) {
    reply(rank, payload);
  }
}

void World::leave(Rank rank, std::string farewell) {
  end_wait(rank);
  Member& leaving = member(rank);
  leaving.presence = Presence::left;
  leaving.farewell = std::move(farewell);
  left_.push_back(rank);
  if (!complete_) {
    fail_left("rendezvous", {rank});
    return;
  }
  for (auto at = gatherings_.begin(); at != gatherings_.end();) {
    const auto current = at++;  // The call may erase it.
    if (current->second.operation == Operation::broadcast) {
      settle_broadcast(current->first, current->second);
    } else {
      miss_the_left(current->second);
    }
    if (failure_.has_value()) {
      return;
    }
  }
  for (Rank other = 0; other < size(); ++other) {
    if (member(other).wait_for == WaitFor::mail && member(other).from == rank) {
      fail_left(member(other).name, {rank});
      return;
    }
  }
}

void World::gone(Rank rank, const std::string& why) {
  Member& lost = member(rank);
  if (lost.presence != Presence::present || failure_.has_value()) {
    return;
  }
  lost.farewell = why;
  // The phase that waits for it, or the last that it was in.
  std::string phase = lost.last_phase;
  for (const auto& [sequence, gathering] : gatherings_) {
    if (!gathering.statements[static_cast<std::size_t>(rank)].has_value()) {
      phase = gathering.phase;
      break;
    }
  }
  for (const Member& each : members_) {
    if (each.wait_for == WaitFor::mail && each.from == rank) {
      phase = each.name;
    }
  }
  lost.presence = Presence::left;
  fail_left(phase, {rank});
}

void World::fail_left(const std::string& phase, const std::vector<Rank>& ranks) {
  const Member& first = member(ranks.front());
  fail(Errc::peer_lost, in_phase(phase) + "ranks that have left: " + list_ranks(ranks) +
                            " (process " + std::to_string(first.peer.pid) + " on " +
                            first.peer.host_name +
                            (first.farewell.empty() ? "" : ": " + first.farewell) + ")");
}

void World::fail_late(const std::string& phase, const std::vector<Rank>& ranks) {
  fail(Errc::timed_out,
       in_phase(phase) + "the deadline passed; ranks missing: " + list_ranks(ranks));
}

void World::fail(Errc code, const std::string& text) {
  if (failure_.has_value()) {
    return;
  }
  failure_ = Refusal{false, code, text};
  const Payload payload =
      payload_of(Writer().u8(static_cast<std::uint8_t>(code)).text(text).take());
  gatherings_.clear();
  mail_.clear();
  keys_.clear();
  key_waiters_.clear();
  deadlines_.clear();
  for (Rank rank = 0; rank < size(); ++rank) {
    if (member(rank).presence == Presence::present) {
      deliver_(rank, Kind::failure, 0, payload);
    }
  }
}

std::optional<Deadline> World::next_deadline() const {
  return deadlines_.empty() ? std::nullopt : std::optional(deadlines_.begin()->first);
}

void World::expire(Deadline now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const Rank rank = deadlines_.begin()->second;
    const Member& late = member(rank);
    switch (late.wait_for) {
      case WaitFor::ranks:
        fail_late("rendezvous",
                  pick([&](Rank r) { return member(r).presence == Presence::absent; }));
        return;
      case WaitFor::collective: {
        const Gathering& gathering = gatherings_.at(late.collective);
        fail_late(late.name, gathering.operation == Operation::broadcast
                                 ? std::vector<Rank>{gathering.root}
                                 : missing(gathering));
        return;
      }
      case WaitFor::mail:
        fail_late(late.name, {late.from});
        return;
      case WaitFor::key:
        reply(rank,
              payload_of(
                  Writer().u8(static_cast<std::uint8_t>(wire::KeyStatus::absent)).text({}).take()));
        break;
      case WaitFor::nothing:
        deadlines_.erase(deadlines_.begin());
        break;
    }
  }
}

}  // namespace m2n
