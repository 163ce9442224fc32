// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/acceptor.hpp"

#include <fcntl.h>

#include <chrono>
#include <exception>
#include <utility>

namespace m2n {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

/// After a failed accept.
constexpr std::chrono::milliseconds kPause{20};

}  // namespace

Acceptor::Acceptor(asio::io_context& io, ListenSocket socket,
                   std::function<void(tcp::socket)> welcome, std::function<void()> make_room)
    : acceptor_(io), pause_(io), welcome_(std::move(welcome)), make_room_(std::move(make_room)) {
  const bool v6 = socket.address().find(':') != std::string::npos;
  acceptor_.assign(v6 ? tcp::v6() : tcp::v4(), socket.descriptor());
  socket.release();
  accept();
}

void Acceptor::close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
}

void Acceptor::accept() {
  acceptor_.async_accept([this](error_code error, tcp::socket client) {
    if (!acceptor_.is_open()) {
      return;
    }
    if (!error) {
      ::fcntl(client.native_handle(), F_SETFD, FD_CLOEXEC);
      error_code ignored;
      client.set_option(tcp::no_delay(true), ignored);
      client.set_option(asio::socket_base::keep_alive(true), ignored);
      accept();
      welcome_(std::move(client));
      return;
    }
    make_room_();
    pause_.expires_after(kPause);
    pause_.async_wait([this](error_code stopped) {
      if (!stopped && acceptor_.is_open()) {
        accept();
      }
    });
  });
}

void run_to_end(asio::io_context& io) {
  for (;;) {
    try {
      io.run();
      return;
    } catch (const std::exception&) {
      continue;
    }
  }
}

}  // namespace m2n
