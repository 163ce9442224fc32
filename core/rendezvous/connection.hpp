// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A client's end of a connection to the store: frames over a socket.

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/rendezvous/stream_socket.hpp"
#include "core/rendezvous/wire.hpp"

namespace m2n {

struct Frame {
  wire::Header header;
  std::string payload;
};

/// send() from any thread, receive() from one at a time. Members throw ConnectionBroken and
/// ConnectionSlow, and wire::Malformed.
class Connection {
 public:
  explicit Connection(StreamSocket socket) : socket_(std::move(socket)) {}

  void send(wire::Kind kind, std::uint64_t request, std::string_view payload, Deadline deadline);
  /// @param max_bytes  Longest payload; the store of a job is trusted.
  Frame receive(Deadline deadline, std::uint64_t max_bytes = UINT64_MAX);
  /// A frame that is already on its way here, without waiting for one to begin.
  std::optional<Frame> poll(Deadline deadline);
  void hang_up() noexcept { socket_.hang_up(); }

 private:
  StreamSocket socket_;
  std::unique_ptr<std::mutex> sending_ = std::make_unique<std::mutex>();
};

}  // namespace m2n
