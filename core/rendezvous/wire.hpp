// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What store and clients say to each other: frames, and the fields inside of them.
///
/// A frame is a header (u64 payload bytes, u8 kind, u64 request) and its payload. Numbers are
/// little endian; a text is a u64 length and its bytes. The server speaks first (challenge), the
/// client answers (hello), and after the welcome each request has one reply with its number.

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n::wire {

inline constexpr std::size_t kHeaderBytes = 17;
/// Longest frame from somebody who has not proved to know the token.
inline constexpr std::uint64_t kMaxHelloBytes = 8192;
/// Longest answer to a greeting.
inline constexpr std::uint64_t kMaxAnswerBytes = std::uint64_t{1} << 20U;
/// Longest phase, key, world or host name.
inline constexpr std::size_t kMaxNameBytes = 1024;
inline constexpr std::string_view kMagic = "m2n store 1";

enum class Kind : std::uint8_t {
  challenge = 1,  ///< nonce
  hello,          ///< Hello
  refused,        ///< u8 again, u8 code, text
  welcome,        ///< u64 epoch, u8 one process, u64 longest value, proof
  reply,          ///< what the request asked for
  failure,        ///< u8 code, text: the world has ended
  collective,     ///< Collective
  send,           ///< phase, i32 to, value
  receive,        ///< phase, i32 from, u64 microseconds
  set,            ///< key, value
  get,            ///< key, u64 microseconds
  try_get,        ///< key
  erase,          ///< key
  add,            ///< key, u64 amount
  peers,          ///< nothing
  leave,          ///< reason
  abort,          ///< reason
};

/// The other side did not keep to the format.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Header {
  std::uint64_t payload_bytes = 0;
  Kind kind = Kind::challenge;
  std::uint64_t request = 0;
};
std::array<char, kHeaderBytes> encode(const Header& header);
/// @throws Malformed for a kind that is none.
Header decode(const std::array<char, kHeaderBytes>& bytes);

class Writer {
 public:
  Writer& u8(std::uint8_t value);
  Writer& u64(std::uint64_t value);
  Writer& rank(Rank value);
  Writer& text(std::string_view value);
  Writer& ranks(const std::vector<Rank>& value);  ///< Ascending; stored as runs.
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Every member throws Malformed when the payload has no such field.
class Reader {
 public:
  explicit Reader(std::string_view payload) : rest_(payload) {}
  std::uint8_t u8();
  std::uint64_t u64();
  Rank rank();
  std::string_view text(std::uint64_t max_bytes);
  std::string name() { return std::string(text(kMaxNameBytes)); }
  std::vector<Rank> ranks(Rank size);
  Errc code();
  /// Throws unless everything was read.
  void end() const;

 private:
  std::string_view take(std::uint64_t bytes);

  std::string_view rest_;
};

struct Hello {
  std::uint64_t epoch = 0;
  std::string world;
  Rank rank = 0;
  Rank size = 0;
  Peer peer;
  std::uint64_t wait_us = 0;  ///< Until the client's deadline.
  std::string nonce;
};
/// @param challenge  The server's nonce, which the proof covers.
std::string encode_hello(const Hello& hello, const std::string& token, std::string_view challenge);
/// @throws Malformed; Error{bad_argument} when the proof does not fit @p token. Compares in
/// constant
///         time.
Hello decode_hello(std::string_view payload, const std::string& token, std::string_view challenge);
/// The server's proof, over the client's nonce.
std::string welcome_proof(const std::string& token, std::string_view nonce);

/// First byte of the answers about keys.
enum class KeyStatus : std::uint8_t { found, absent, refused };

enum class Operation : std::uint8_t { barrier, gather, agree, broadcast };
std::string_view to_string(Operation operation);

struct Collective {
  Operation operation = Operation::barrier;
  std::uint64_t sequence = 0;  ///< Of this rank's collectives, from 0.
  std::string phase;
  Rank root = 0;
  std::uint64_t wait_us = 0;
  bool failed = false;
  std::string_view value;  ///< A view of the payload.
};
std::string encode_collective(const Collective& collective);
Collective decode_collective(std::string_view payload);

std::string encode_verdict(const Verdict& verdict);
Verdict decode_verdict(std::string_view payload, Rank size);

}  // namespace m2n::wire
