// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From a host's name and a port to socket addresses.

#include <netdb.h>

#include <cstdint>
#include <memory>
#include <string>

namespace m2n {

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// TCP addresses of @p host. @throws Error{io} naming it and the resolver's words.
Addresses resolve(const std::string& host, std::uint16_t port);

/// "host:port", "[::1]:port".
std::string endpoint_text(const std::string& host, std::uint16_t port);

/// The system's words for an errno value.
std::string system_text(int error);

}  // namespace m2n
