// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A listening TCP socket, reserved before anybody serves it.

#include <cstdint>
#include <string>

#include "core/rendezvous/file_descriptor.hpp"

namespace m2n {

/// A port of this machine. Peers that connect before a server takes the socket over wait in the
/// kernel's queue, so a port can be reserved, told to others, and served later.
///
/// - Collective: no.
/// - Threads: a value; move-only.
/// - Memory: owns one descriptor, closed on exec.
/// - Streams: none.
/// - Errors: Error{io} naming the address, the port and the system's words.
class ListenSocket {
 public:
  /// @param address  A name or number of this machine; "0.0.0.0" or "::" for all of its addresses.
  /// @param port     0 lets the system choose.
  static ListenSocket reserve(const std::string& address, std::uint16_t port);
  /// Takes over a descriptor that already listens, e.g. one inherited from a launcher.
  /// @throws Error{bad_argument} for any other descriptor, which then stays the caller's.
  static ListenSocket adopt(int descriptor);

  /// The address as bound, in numbers.
  const std::string& address() const noexcept { return address_; }
  std::uint16_t port() const noexcept { return port_; }
  /// Only this machine can connect.
  bool loopback() const noexcept { return loopback_; }

  /// Another handle on the same port: the port stays reserved until the last one is gone. Hand one
  /// to a server and keep one, and the next server (of a new epoch) has the port for certain.
  ListenSocket share() const;

  int descriptor() const noexcept { return descriptor_.get(); }
  /// Gives the descriptor away.
  int release() noexcept { return descriptor_.release(); }

 private:
  explicit ListenSocket(FileDescriptor descriptor);

  FileDescriptor descriptor_;
  std::string address_;
  std::uint16_t port_ = 0;
  bool loopback_ = false;
};

}  // namespace m2n
