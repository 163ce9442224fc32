// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The control plane over HTTP, the server's side.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/control/control.hpp"
#include "core/rendezvous/listen_socket.hpp"

namespace m2n {

struct HttpServerOptions {
  /// Clients send "Authorization: Bearer <token>". May be empty only on loopback.
  std::string token{};
  std::uint64_t max_body_bytes = std::uint64_t{64} << 20U;
  std::uint32_t max_header_bytes = 16U << 10U;
  /// From the connection (or the last answer) to the end of the request's header.
  std::chrono::milliseconds header_time{30'000};
  /// From there to the end of its body.
  std::chrono::milliseconds body_time{60'000};
  /// Deadline of a call whose client names none in "M2N-Timeout-Ms", and the longest it may name.
  std::chrono::milliseconds call_time{3'600'000};
  /// POST calls that run at a time; more are answered 503.
  std::size_t max_calls = 8;
  /// Connections at a time; more push out the oldest that has no call under way.
  std::size_t max_connections = 512;
};

/// Serves a handler:
///
///     POST /init_weight_transfer_engine   the info, or {"init_info": the info}
///     POST /start_weight_update           nothing, or an object
///     POST /update_weights                the update, or {"update_info": the update}
///     POST /finish_weight_update          nothing, or an object
///     GET  /weight_version                {"weight_version": 3, "serving": true, "reason": ""}
///     GET  /health                        200 while serving, else 503; needs no token
///
/// Answers are JSON objects. Errors are {"error": {"type", "message", "code"}}: 400 for what the
/// caller did wrong, 401, 403, 404, 405, 408, 411, 413, 431 as HTTP has them, 503 for unavailable,
/// 504 for a deadline that passed, 500 for the rest.
///
/// - Collective: no.
/// - Threads: one of its own, and one a call under way.
/// - Memory: one body a connection, at most.
/// - Streams: none.
/// - Errors: Error{bad_argument} for options that cannot be served. What clients do wrong is
///   answered, and never ends the server.
class HttpServer {
 public:
  HttpServer(ListenSocket socket, std::shared_ptr<ControlHandler> handler,
             HttpServerOptions options = {});
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  /// Hangs up, and waits for calls under way: make the handler fail first.
  ~HttpServer();

  const std::string& address() const noexcept;
  std::uint16_t port() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace m2n
