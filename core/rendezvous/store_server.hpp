// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The store that ranks meet at: keys, collectives and mail, over TCP, for one epoch.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "core/api/group.hpp"
#include "core/rendezvous/listen_socket.hpp"

namespace m2n {

struct StoreOptions {
  /// What every client must know; it never travels itself. May be empty only on loopback.
  std::string token{};
  /// The attempt at building the job that this store serves, from 1; clients of another are
  /// refused.
  std::uint64_t epoch = 1;
  /// Longest value that one client may send.
  std::uint64_t max_value_bytes = std::uint64_t{64} << 20U;
  /// A client that has not proved to know the token by then is disconnected.
  std::chrono::milliseconds handshake_time{10'000};
  /// Strangers (clients that have not proved it yet) at a time; more push the oldest out.
  std::size_t max_strangers = 4096;
};

/// Serves one epoch on its own thread, in the process of rank 0.
///
/// - Collective: no.
/// - Threads: every member may be called from any thread.
/// - Memory: what clients store, until they erase it or the server ends. Unread mail counts.
/// - Streams: none.
/// - Errors: Error{bad_argument} for options that cannot be served. What clients do wrong is told
///   to them and never ends the server.
class StoreServer {
 public:
  StoreServer(ListenSocket socket, StoreOptions options);
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  /// Tells whoever still waits that the store has closed, and ends the thread. What was answered
  /// before still arrives. Call drain() first to outlive every reader.
  ~StoreServer();

  const std::string& address() const noexcept;
  std::uint16_t port() const noexcept;
  std::uint64_t epoch() const noexcept;

  /// Makes every rank of every world fail now, with @p reason; also those that only arrive later
  /// (but for those of kCurrentEpoch, which wait for the next store).
  void abort(const std::string& reason) noexcept;

  /// Waits until every client has left. @return Whether they had when @p deadline passed.
  bool drain(Deadline deadline);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace m2n
