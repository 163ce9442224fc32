// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/addresses.hpp"

#include <sys/socket.h>

#include <system_error>

#include "core/error.hpp"

namespace m2n {

Addresses resolve(const std::string& host, std::uint16_t port) {
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (status != 0 || host.empty()) {
    throw Error(Errc::io, "cannot find the address of host '" + host +
                              "': " + (host.empty() ? "it is empty" : ::gai_strerror(status)));
  }
  return Addresses(found);
}

std::string endpoint_text(const std::string& host, std::uint16_t port) {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string system_text(int error) { return std::system_category().message(error); }

}  // namespace m2n
