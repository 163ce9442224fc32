// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One client's connection to the store. Everything here lives on the server's thread.

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/rendezvous/store_server.hpp"
#include "core/rendezvous/world.hpp"

namespace m2n {

class StoreSession;

/// A world and the connections of its ranks.
struct StoreRoom {
  StoreRoom(Rank size, const StoreOptions& options);

  std::vector<StoreSession*> seats;
  World world;
};

/// What the sessions of a server share.
struct StoreState {
  explicit StoreState(StoreOptions o) : options(std::move(o)) {}

  StoreOptions options;
  std::map<std::string, StoreRoom> rooms;
  std::set<StoreSession*> sessions;
  std::list<StoreSession*> strangers;  ///< Those that sit in no room; oldest first.
  std::optional<std::string> aborted;
  std::function<void()> changed;  ///< Called when deadlines or sessions may have changed.
};

/// Alive while something is under way on the connection.
class StoreSession : public std::enable_shared_from_this<StoreSession> {
 public:
  StoreSession(boost::asio::ip::tcp::socket socket, StoreState& store);
  StoreSession(const StoreSession&) = delete;
  StoreSession& operator=(const StoreSession&) = delete;

  void start();
  void deliver(wire::Kind kind, std::uint64_t request, World::Payload payload);
  /// @param why  What the other ranks read of this one.
  void close(const std::string& why);
  /// Lets what was answered arrive; the client is expected to hang up then.
  void finish();

 private:
  struct Answer {
    std::array<char, wire::kHeaderBytes> header;
    World::Payload payload;
  };

  template <class Step>
  void guarded(Step step);
  void read_header();
  void have_header(boost::system::error_code error);
  void read_payload();
  void have_frame();
  void greet();
  std::optional<Refusal> admit(const wire::Hello& hello);
  void refuse(const Refusal& refusal);
  void write();
  void have_written(boost::system::error_code error);

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  StoreState& store_;
  std::list<StoreSession*>::iterator stranger_;  ///< Valid while room_ is null.
  StoreRoom* room_ = nullptr;
  Rank rank_ = 0;
  std::string challenge_;
  std::array<char, wire::kHeaderBytes> header_bytes_{};
  wire::Header header_;
  std::string payload_;
  std::deque<Answer> answers_;
  bool refused_ = false;
  bool paused_ = false;
  bool finishing_ = false;
  bool closed_ = false;
};

}  // namespace m2n
