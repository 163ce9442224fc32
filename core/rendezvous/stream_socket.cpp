// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/stream_socket.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "core/rendezvous/addresses.hpp"

namespace m2n {
namespace {

/// Waits until @p descriptor can do @p events. @return Whether it can by the deadline.
bool wait_for(int descriptor, short events, Deadline deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto wait_ms = std::clamp<std::chrono::milliseconds::rep>(
        left.count(), 0, std::numeric_limits<int>::max());
    pollfd watched{descriptor, events, 0};
    const int changed = ::poll(&watched, 1, static_cast<int>(wait_ms));
    if (changed > 0) {
      return true;
    }
    if (changed < 0 && errno != EINTR) {
      throw ConnectionBroken(system_text(errno));
    }
    if (changed == 0 && std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
  }
}

}  // namespace

StreamSocket StreamSocket::open(const std::string& host, std::uint16_t port, Deadline deadline) {
  const Addresses found = resolve(host, port);
  std::string why = "no address";
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    FileDescriptor socket(
        ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol));
    if (socket.get() < 0) {
      why = system_text(errno);
      continue;
    }
    int status = ::connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (status == EINPROGRESS) {
      if (!wait_for(socket.get(), POLLOUT, deadline)) {
        throw ConnectionSlow("no answer from " + endpoint_text(host, port));
      }
      socklen_t size = sizeof status;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &status, &size);
    }
    if (status == 0) {
      const int on = 1;
      ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      return StreamSocket(std::move(socket));
    }
    why = system_text(status);
  }
  throw ConnectionBroken(why);
}

void StreamSocket::write(std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(descriptor_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!wait_for(descriptor_.get(), POLLOUT, deadline)) {
        throw ConnectionSlow("it takes no more bytes");
      }
    } else if (errno != EINTR) {
      throw ConnectionBroken(system_text(errno));
    }
  }
}

std::size_t StreamSocket::read_some(char* into, std::size_t bytes, Deadline deadline) {
  for (;;) {
    const ssize_t got = ::recv(descriptor_.get(), into, bytes, 0);
    if (got >= 0) {
      return static_cast<std::size_t>(got);
    }
    if (errno == EAGAIN) {
      if (!wait_for(descriptor_.get(), POLLIN, deadline)) {
        throw ConnectionSlow("no answer");
      }
    } else if (errno != EINTR) {
      throw ConnectionBroken(system_text(errno));
    }
  }
}

void StreamSocket::read(char* into, std::size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    const std::size_t got = read_some(into, bytes, deadline);
    if (got == 0) {
      throw ConnectionBroken("it hung up");
    }
    into += got;
    bytes -= got;
  }
}

bool StreamSocket::readable() const { return wait_for(descriptor_.get(), POLLIN, Deadline{}); }

void StreamSocket::hang_up() noexcept { ::shutdown(descriptor_.get(), SHUT_RDWR); }

}  // namespace m2n
