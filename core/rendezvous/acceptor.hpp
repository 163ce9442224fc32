// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Accepts connections for a server, come what may.

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>

#include "core/rendezvous/listen_socket.hpp"

namespace m2n {

/// Lives on the thread that runs its io_context.
class Acceptor {
 public:
  /// @param welcome    Takes a client.
  /// @param make_room  Called when none can be accepted, for want of descriptors say: lets go of
  ///                   somebody.
  Acceptor(boost::asio::io_context& io, ListenSocket socket,
           std::function<void(boost::asio::ip::tcp::socket)> welcome,
           std::function<void()> make_room);

  void close();

 private:
  void accept();

  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  std::function<void(boost::asio::ip::tcp::socket)> welcome_;
  std::function<void()> make_room_;
};

/// io.run(), in spite of what handlers throw: out of memory for one client, the others go on.
void run_to_end(boost::asio::io_context& io);

}  // namespace m2n
