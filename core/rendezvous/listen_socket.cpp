// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/listen_socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/rendezvous/addresses.hpp"

namespace m2n {
namespace {

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(v4.sin_addr.s_addr) >> 24U) == 127;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) != 0;
}

}  // namespace

ListenSocket::ListenSocket(FileDescriptor descriptor) : descriptor_(std::move(descriptor)) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(descriptor_.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    throw Error(Errc::io, std::string("cannot ask a listening socket for its address: ") +
                              system_text(errno));
  }
  char host[INET6_ADDRSTRLEN] = "";
  if (bound.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(bound);
    ::inet_ntop(AF_INET, &v4.sin_addr, host, sizeof host);
    port_ = ntohs(v4.sin_port);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(bound);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof host);
    port_ = ntohs(v6.sin6_port);
  }
  address_ = host;
  loopback_ = is_loopback(bound);
}

ListenSocket ListenSocket::reserve(const std::string& address, std::uint16_t port) {
  const Addresses found = resolve(address, port);
  std::string why = "it has no address";
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    FileDescriptor descriptor(
        ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    const int on = 1;
    if (descriptor.get() >= 0 &&
        ::setsockopt(descriptor.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(descriptor.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::listen(descriptor.get(), SOMAXCONN) == 0) {
      return ListenSocket(std::move(descriptor));
    }
    why = system_text(errno);
  }
  throw Error(Errc::io, "cannot listen on " + endpoint_text(address, port) + ": " + why);
}

ListenSocket ListenSocket::adopt(int descriptor) {
  int listens = 0;
  int family = 0;
  socklen_t size = sizeof listens;
  if (::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0 ||
      ::getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 ||
      (family != AF_INET && family != AF_INET6)) {
    throw Error(Errc::bad_argument, "descriptor " + std::to_string(descriptor) +
                                        " is not a listening TCP socket, so no port is reserved "
                                        "by it");
  }
  ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return ListenSocket(FileDescriptor(descriptor));
}

ListenSocket ListenSocket::share() const {
  FileDescriptor copy(::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) {
    throw Error(Errc::io, "cannot share the socket that listens on " +
                              endpoint_text(address_, port_) + ": " + system_text(errno));
  }
  return ListenSocket(std::move(copy));
}

}  // namespace m2n
