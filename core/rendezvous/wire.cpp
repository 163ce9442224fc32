// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/wire.hpp"

#include <limits>
#include <utility>

#include "core/rendezvous/secrets.hpp"

namespace m2n::wire {
namespace {

void put_u64(char* at, std::uint64_t value) {
  for (unsigned byte = 0; byte < 8; ++byte) {
    at[byte] = static_cast<char>((value >> (8 * byte)) & 0xffU);
  }
}

std::uint64_t get_u64(const char* at) {
  std::uint64_t value = 0;
  for (unsigned byte = 0; byte < 8; ++byte) {
    value |= std::uint64_t{static_cast<unsigned char>(at[byte])} << (8 * byte);
  }
  return value;
}

std::string hello_proof(const std::string& token, std::string_view challenge,
                        std::string_view fields) {
  std::string text = "m2n client";
  text.append(challenge).append(fields);
  return keyed_hash(token, text);
}

}  // namespace

std::array<char, kHeaderBytes> encode(const Header& header) {
  std::array<char, kHeaderBytes> bytes{};
  put_u64(bytes.data(), header.payload_bytes);
  bytes[8] = static_cast<char>(header.kind);
  put_u64(bytes.data() + 9, header.request);
  return bytes;
}

Header decode(const std::array<char, kHeaderBytes>& bytes) {
  const auto kind = static_cast<std::uint8_t>(bytes[8]);
  if (kind < static_cast<std::uint8_t>(Kind::challenge) ||
      kind > static_cast<std::uint8_t>(Kind::abort)) {
    throw Malformed("a frame of no known kind");
  }
  return {get_u64(bytes.data()), static_cast<Kind>(kind), get_u64(bytes.data() + 9)};
}

Writer& Writer::u8(std::uint8_t value) {
  out_.push_back(static_cast<char>(value));
  return *this;
}

Writer& Writer::u64(std::uint64_t value) {
  char bytes[8];
  put_u64(bytes, value);
  out_.append(bytes, sizeof bytes);
  return *this;
}

Writer& Writer::rank(Rank value) {
  return u64(static_cast<std::uint64_t>(static_cast<std::int64_t>(value)));
}

Writer& Writer::text(std::string_view value) {
  u64(value.size());
  out_.append(value);
  return *this;
}

Writer& Writer::ranks(const std::vector<Rank>& value) {
  std::vector<std::pair<Rank, Rank>> runs;  // first, count
  for (const Rank rank : value) {
    if (!runs.empty() && runs.back().first + runs.back().second == rank) {
      ++runs.back().second;
    } else {
      runs.emplace_back(rank, 1);
    }
  }
  u64(runs.size());
  for (const auto& [first, count] : runs) {
    rank(first).rank(count);
  }
  return *this;
}

std::string_view Reader::take(std::uint64_t bytes) {
  if (bytes > rest_.size()) {
    throw Malformed("a frame that ends inside of a field");
  }
  const std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

std::uint8_t Reader::u8() { return static_cast<std::uint8_t>(take(1)[0]); }

std::uint64_t Reader::u64() { return get_u64(take(8).data()); }

Rank Reader::rank() {
  const auto value = static_cast<std::int64_t>(u64());
  if (value < 0 || value > std::numeric_limits<Rank>::max()) {
    throw Malformed("a rank that is none");
  }
  return static_cast<Rank>(value);
}

std::string_view Reader::text(std::uint64_t max_bytes) {
  const std::uint64_t bytes = u64();
  if (bytes > max_bytes) {
    throw Malformed("a text of " + std::to_string(bytes) + " bytes where " +
                    std::to_string(max_bytes) + " are allowed");
  }
  return take(bytes);
}

std::vector<Rank> Reader::ranks(Rank size) {
  std::vector<Rank> ranks;
  for (std::uint64_t runs = u64(); runs > 0; --runs) {
    const Rank first = rank();
    const Rank count = rank();
    if (first >= size || count > size - first || (!ranks.empty() && first <= ranks.back())) {
      throw Malformed("a list of ranks that is none");
    }
    for (Rank offset = 0; offset < count; ++offset) {
      ranks.push_back(first + offset);
    }
  }
  return ranks;
}

Errc Reader::code() {
  const std::uint8_t value = u8();
  if (value > static_cast<std::uint8_t>(Errc::io)) {
    throw Malformed("an error code that is none");
  }
  return static_cast<Errc>(value);
}

void Reader::end() const {
  if (!rest_.empty()) {
    throw Malformed("a frame with bytes after its last field");
  }
}

std::string encode_hello(const Hello& hello, const std::string& token, std::string_view challenge) {
  Writer fields;
  fields.text(kMagic).u64(hello.epoch).text(hello.world).rank(hello.rank).rank(hello.size);
  fields.text(hello.peer.host_name).text(hello.peer.machine).text(hello.peer.memory);
  fields.text(hello.peer.process).u64(static_cast<std::uint64_t>(hello.peer.pid));
  fields.u64(hello.wait_us).text(hello.nonce);
  std::string out = fields.take();
  const std::string proof = hello_proof(token, challenge, out);
  return out + Writer().text(proof).take();
}

Hello decode_hello(std::string_view payload, const std::string& token, std::string_view challenge) {
  Reader reader(payload);
  if (reader.text(kMagic.size()) != kMagic) {
    throw Malformed("a greeting of another protocol");
  }
  Hello hello;
  hello.epoch = reader.u64();
  hello.world = reader.name();
  hello.rank = reader.rank();
  hello.size = reader.rank();
  hello.peer.host_name = reader.name();
  hello.peer.machine = reader.name();
  hello.peer.memory = reader.name();
  hello.peer.process = reader.name();
  hello.peer.pid = static_cast<std::int64_t>(reader.u64());
  hello.wait_us = reader.u64();
  hello.nonce = std::string(reader.text(kNonceBytes));
  const std::string_view proof = reader.text(kMaxHashBytes);
  reader.end();
  const std::string_view fields = payload.substr(0, payload.size() - proof.size() - 8);
  if (!equal_secrets(proof, hello_proof(token, challenge, fields))) {
    throw Error(Errc::bad_argument, "the token is not that of this job");
  }
  return hello;
}

std::string welcome_proof(const std::string& token, std::string_view nonce) {
  std::string text = "m2n server";
  return keyed_hash(token, text.append(nonce));
}

std::string_view to_string(Operation operation) {
  switch (operation) {
    case Operation::barrier:
      return "barrier";
    case Operation::gather:
      return "all-gather";
    case Operation::agree:
      return "agreement";
    case Operation::broadcast:
      return "broadcast";
  }
  return "unknown";
}

std::string encode_collective(const Collective& collective) {
  return Writer()
      .u8(static_cast<std::uint8_t>(collective.operation))
      .u64(collective.sequence)
      .text(collective.phase)
      .rank(collective.root)
      .u64(collective.wait_us)
      .u8(collective.failed ? 1 : 0)
      .text(collective.value)
      .take();
}

Collective decode_collective(std::string_view payload) {
  Reader reader(payload);
  Collective collective;
  const std::uint8_t operation = reader.u8();
  if (operation > static_cast<std::uint8_t>(Operation::broadcast)) {
    throw Malformed("a collective of no known kind");
  }
  collective.operation = static_cast<Operation>(operation);
  collective.sequence = reader.u64();
  collective.phase = reader.name();
  collective.root = reader.rank();
  collective.wait_us = reader.u64();
  collective.failed = reader.u8() != 0;
  collective.value = reader.text(payload.size());
  reader.end();
  if (collective.operation == Operation::agree && collective.value.size() > kMaxStatementBytes) {
    throw Malformed("a statement that is too long");
  }
  return collective;
}

std::string encode_verdict(const Verdict& verdict) {
  Writer writer;
  writer.u64(verdict.sides.size());
  for (const Verdict::Side& side : verdict.sides) {
    writer.u8(side.statement.failed ? 1 : 0).text(side.statement.text).ranks(side.ranks);
  }
  return writer.ranks(verdict.others).take();
}

Verdict decode_verdict(std::string_view payload, Rank size) {
  Reader reader(payload);
  Verdict verdict;
  const std::uint64_t sides = reader.u64();
  if (sides > kMaxSides) {
    throw Malformed("a verdict with too many sides");
  }
  for (std::uint64_t side = 0; side < sides; ++side) {
    const bool failed = reader.u8() != 0;
    const std::string text(reader.text(kMaxStatementBytes));
    verdict.sides.push_back({{failed, text}, reader.ranks(size)});
  }
  verdict.others = reader.ranks(size);
  reader.end();
  return verdict;
}

}  // namespace m2n::wire
