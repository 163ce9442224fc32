// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A client's TCP socket whose every wait has a deadline.

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/api/group.hpp"
#include "core/rendezvous/file_descriptor.hpp"

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

/// Owns one descriptor and no thread. One thread may read while another writes. Members throw the
/// two errors above.
class StreamSocket {
 public:
  /// @throws also Error{io} for a host without an address.
  static StreamSocket open(const std::string& host, std::uint16_t port, Deadline deadline);

  void write(std::string_view bytes, Deadline deadline);
  /// At least one byte, and at most @p bytes. @return 0 when the other side hung up.
  std::size_t read_some(char* into, std::size_t bytes, Deadline deadline);
  void read(char* into, std::size_t bytes, Deadline deadline);
  /// Something can be read, or the connection is over.
  bool readable() const;
  /// From any thread: what waits here ends as if the other side had hung up.
  void hang_up() noexcept;

 private:
  explicit StreamSocket(FileDescriptor descriptor) : descriptor_(std::move(descriptor)) {}

  FileDescriptor descriptor_;
};

}  // namespace m2n
