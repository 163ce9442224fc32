// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The mail and the keys of a world.

#include <charconv>
#include <string>

#include "core/rendezvous/world.hpp"

namespace m2n {

using wire::Kind;
using wire::Malformed;
using wire::Reader;
using wire::Writer;

namespace {

using enum wire::KeyStatus;

std::string key_answer(wire::KeyStatus status, std::string_view text) {
  return Writer().u8(static_cast<std::uint8_t>(status)).text(text).take();
}

}  // namespace

void World::send(Rank rank, std::uint64_t request, Reader reader) {
  Letter letter;
  letter.phase = reader.name();
  const Rank to = reader.rank();
  letter.value = std::string(reader.text(UINT64_MAX));
  reader.end();
  if (to >= size()) {
    throw Malformed("mail to no rank");
  }
  member(rank).last_phase = letter.phase;
  if (member(to).presence == Presence::left) {
    fail_left(letter.phase, {to});
    return;
  }
  mail_[{rank, to}].push_back(std::move(letter));
  answer(rank, request, {});
  const Member& receiver = member(to);
  if (receiver.wait_for == WaitFor::mail && receiver.from == rank) {
    hand_over(rank, to);
  }
}

void World::receive(Rank rank, std::uint64_t request, Reader reader, Deadline now) {
  const std::string phase = reader.name();
  const Rank from = reader.rank();
  const std::uint64_t wait_us = reader.u64();
  reader.end();
  if (from >= size()) {
    throw Malformed("mail from no rank");
  }
  Member& receiver = member(rank);
  receiver.last_phase = phase;
  receiver.name = phase;
  receiver.from = from;
  wait(rank, WaitFor::mail, request, wait_us, now);
  if (mail_.contains({from, rank})) {
    hand_over(from, rank);
  } else if (member(from).presence == Presence::left) {
    fail_left(phase, {from});
  }
}

void World::hand_over(Rank from, Rank to) {
  const auto at = mail_.find({from, to});
  const Letter letter = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) {
    mail_.erase(at);
  }
  if (letter.phase != member(to).name) {
    fail(Errc::peer_lost, "rank " + std::to_string(to) + " waits for mail of phase '" +
                              member(to).name + "', but rank " + std::to_string(from) +
                              " sent it mail of phase '" + letter.phase +
                              "'; ranks must agree on the order");
    return;
  }
  reply(to, std::make_shared<const std::string>(letter.value));
}

void World::keys(Rank rank, const wire::Header& header, Reader reader, Deadline now) {
  const std::string key = reader.name();
  const auto at = keys_.find(key);
  switch (header.kind) {
    case Kind::set: {
      std::string value(reader.text(UINT64_MAX));
      reader.end();
      answer(rank, header.request, key_answer(found, {}));
      set(key, std::move(value));
      return;
    }
    case Kind::get:
    case Kind::try_get: {
      const std::uint64_t wait_us = header.kind == Kind::get ? reader.u64() : 0;
      reader.end();
      if (at != keys_.end()) {
        answer(rank, header.request, key_answer(found, at->second));
      } else if (wait_us == 0) {
        answer(rank, header.request, key_answer(absent, {}));
      } else {
        member(rank).name = key;
        wait(rank, WaitFor::key, header.request, wait_us, now);
        key_waiters_[key].insert(rank);
      }
      return;
    }
    case Kind::erase:
      reader.end();
      keys_.erase(key);
      answer(rank, header.request, key_answer(found, {}));
      return;
    case Kind::add: {
      const auto amount = static_cast<std::int64_t>(reader.u64());
      reader.end();
      add(rank, header.request, key, amount);
      return;
    }
    default:
      throw Malformed("a frame that no client sends");
  }
}

void World::add(Rank rank, std::uint64_t request, const std::string& key, std::int64_t amount) {
  std::int64_t sum = 0;
  if (const auto at = keys_.find(key); at != keys_.end()) {
    const std::string& text = at->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sum);
    if (error != std::errc() || end != text.data() + text.size()) {
      answer(rank, request, key_answer(refused, "key '" + key + "' holds no number to add to"));
      return;
    }
  }
  if (__builtin_add_overflow(sum, amount, &sum)) {
    answer(rank, request, key_answer(refused, "key '" + key + "' would leave 64 bits"));
    return;
  }
  answer(rank, request, key_answer(found, std::to_string(sum)));
  set(key, std::to_string(sum));
}

void World::set(const std::string& key, std::string value) {
  if (const auto waiters = key_waiters_.find(key); waiters != key_waiters_.end()) {
    const auto payload = std::make_shared<const std::string>(key_answer(found, value));
    for (const Rank rank : waiters->second) {
      if (member(rank).wait_for == WaitFor::key && member(rank).name == key) {
        reply(rank, payload);
      }
    }
    key_waiters_.erase(waiters);
  }
  keys_[key] = std::move(value);
}

}  // namespace m2n
