// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A client's end of a connection to the store: frames over a socket, each wait with a deadline.

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "core/rendezvous/file_descriptor.hpp"
#include "core/rendezvous/wire.hpp"

namespace m2n {

/// The connection is over: closed, reset, or never made.
class ConnectionBroken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The deadline passed before the bytes had moved.
class ConnectionSlow : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Frame {
  wire::Header header;
  std::string payload;
};

/// send() from any thread, receive() from one at a time. Owns one descriptor and no thread.
class Connection {
 public:
  /// @throws ConnectionBroken, ConnectionSlow; Error{io} for a host without an address.
  static Connection open(const std::string& address, std::uint16_t port, Deadline deadline);

  void send(wire::Kind kind, std::uint64_t request, std::string_view payload, Deadline deadline);
  /// @param max_bytes  Longest payload; the store of a job is trusted.
  Frame receive(Deadline deadline, std::uint64_t max_bytes = UINT64_MAX);
  /// A frame that is already on its way here, without waiting for one to begin.
  std::optional<Frame> poll(Deadline deadline);
  void hang_up() noexcept;

 private:
  explicit Connection(FileDescriptor socket) : socket_(std::move(socket)) {}

  void write(std::string_view bytes, Deadline deadline);
  void read(char* into, std::size_t bytes, Deadline deadline);

  FileDescriptor socket_;
  std::unique_ptr<std::mutex> sending_ = std::make_unique<std::mutex>();
};

}  // namespace m2n
