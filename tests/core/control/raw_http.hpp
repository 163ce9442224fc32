// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// HTTP by hand, right and wrong.

#include <string>

#include "core/control/http_server.hpp"
#include "core/rendezvous/stream_socket.hpp"

namespace m2n::testing {

inline Deadline long_deadline() { return deadline_in(std::chrono::seconds(120)); }

inline StreamSocket connect_to(const HttpServer& server) {
  return StreamSocket::open("127.0.0.1", server.port(), long_deadline());
}

/// All that comes until the server hangs up.
inline std::string read_all(StreamSocket& socket) {
  std::string all;
  char some[4096];
  try {
    while (const std::size_t got = socket.read_some(some, sizeof some, long_deadline())) {
      all.append(some, got);
    }
  } catch (const ConnectionBroken&) {
    all += "<reset>";
  }
  return all;
}

/// What the server answers to @p request until it hangs up.
inline std::string ask(const HttpServer& server, const std::string& request) {
  StreamSocket socket = connect_to(server);
  try {
    socket.write(request, long_deadline());
  } catch (const ConnectionBroken&) {
    // It has read enough.
  }
  return read_all(socket);
}

/// A request that asks to hang up afterwards. @param fields  Whole lines.
inline std::string request(const std::string& line, const std::string& fields,
                           const std::string& body) {
  return line + " HTTP/1.1\r\nHost: here\r\nConnection: close\r\n" + fields +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

inline const char* const kBearer = "Authorization: Bearer secret\r\n";

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace m2n::testing
