// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/connection.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <limits>

#include "core/rendezvous/addresses.hpp"

namespace m2n {
namespace {

/// How much of a frame is made room for before it has come.
constexpr std::uint64_t kReadStep = std::uint64_t{1} << 20U;

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

Connection Connection::open(const std::string& address, std::uint16_t port, Deadline deadline) {
  const Addresses found = resolve(address, port);
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
        throw ConnectionSlow("no answer from " + endpoint_text(address, port));
      }
      socklen_t size = sizeof status;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &status, &size);
    }
    if (status == 0) {
      const int on = 1;
      ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      return Connection(std::move(socket));
    }
    why = system_text(status);
  }
  throw ConnectionBroken(why);
}

void Connection::write(std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!wait_for(socket_.get(), POLLOUT, deadline)) {
        throw ConnectionSlow("it takes no more bytes");
      }
    } else if (errno != EINTR) {
      throw ConnectionBroken(system_text(errno));
    }
  }
}

void Connection::read(char* into, std::size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    const ssize_t got = ::recv(socket_.get(), into, bytes, 0);
    if (got > 0) {
      into += got;
      bytes -= static_cast<std::size_t>(got);
    } else if (got == 0) {
      throw ConnectionBroken("it hung up");
    } else if (errno == EAGAIN) {
      if (!wait_for(socket_.get(), POLLIN, deadline)) {
        throw ConnectionSlow("no answer");
      }
    } else if (errno != EINTR) {
      throw ConnectionBroken(system_text(errno));
    }
  }
}

void Connection::send(wire::Kind kind, std::uint64_t request, std::string_view payload,
                      Deadline deadline) {
  const auto header = wire::encode({payload.size(), kind, request});
  std::string bytes(header.data(), header.size());
  const std::lock_guard lock(*sending_);
  write(bytes.append(payload), deadline);
}

Frame Connection::receive(Deadline deadline, std::uint64_t max_bytes) {
  std::array<char, wire::kHeaderBytes> bytes{};
  read(bytes.data(), bytes.size(), deadline);
  Frame frame{wire::decode(bytes), {}};
  if (frame.header.payload_bytes > max_bytes) {
    throw wire::Malformed("a frame of " + std::to_string(frame.header.payload_bytes) + " bytes");
  }
  while (frame.payload.size() < frame.header.payload_bytes) {
    const std::uint64_t have = frame.payload.size();
    frame.payload.resize(std::min(frame.header.payload_bytes, have + kReadStep));
    read(frame.payload.data() + have, frame.payload.size() - have, deadline);
  }
  return frame;
}

std::optional<Frame> Connection::poll(Deadline deadline) {
  if (!wait_for(socket_.get(), POLLIN, Deadline{})) {
    return std::nullopt;
  }
  return receive(deadline);
}

void Connection::hang_up() noexcept { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace m2n
