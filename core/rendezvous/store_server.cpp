// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/store_server.hpp"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "core/rendezvous/acceptor.hpp"
#include "core/rendezvous/addresses.hpp"
#include "core/rendezvous/store_session.hpp"

namespace m2n {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

/// How long the end of a server waits for clients to take their last answers.
constexpr std::chrono::milliseconds kLastWords{1000};

}  // namespace

class StoreServer::Impl {
 public:
  Impl(ListenSocket socket, StoreOptions options)
      : address_(socket.address()), port_(socket.port()), store_(std::move(options)) {
    if (store_.options.token.empty() && !socket.loopback()) {
      throw Error(Errc::bad_argument, "the store would listen on " +
                                          endpoint_text(address_, port_) +
                                          " for anybody; give the job a token, or listen on "
                                          "127.0.0.1");
    }
    expects(store_.options.epoch != kCurrentEpoch, "a store's epoch to be 1 or more");
    store_.changed = [this] { changed(); };
    acceptor_.emplace(
        io_, std::move(socket), [this](tcp::socket client) { welcome(std::move(client)); },
        [this] { push_out(); });
    thread_ = std::thread([this] { run_to_end(io_); });
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    try {
      asio::post(io_, [this] { end(); });
    } catch (const std::exception&) {
      io_.stop();  // No memory for last words.
    }
    thread_.join();
    store_.changed = [] {};
  }

  const std::string& address() const noexcept { return address_; }
  std::uint16_t port() const noexcept { return port_; }
  std::uint64_t epoch() const noexcept { return store_.options.epoch; }

  void abort(const std::string& reason) noexcept {
    try {
      asio::post(io_, [this, reason] { abort_here(reason); });
    } catch (const std::exception&) {
      // No memory to tell anybody; deadlines will.
    }
  }

  bool drain(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return emptied_.wait_until(lock, deadline, [&] { return seated_ == 0; });
  }

 private:
  void welcome(tcp::socket client) {
    if (store_.strangers.size() >= store_.options.max_strangers) {
      push_out();
    }
    std::make_shared<StoreSession>(std::move(client), store_)->start();
  }

  void push_out() {
    if (!store_.strangers.empty()) {
      store_.strangers.front()->close("pushed out");
    }
  }

  /// Sets the timer to the worlds' next deadline.
  void changed() {
    {
      const std::lock_guard lock(mutex_);
      seated_ = store_.sessions.size() - store_.strangers.size();
      if (seated_ == 0) {
        emptied_.notify_all();
      }
    }
    std::optional<Deadline> next;
    for (const auto& [name, room] : store_.rooms) {
      if (const std::optional<Deadline> at = room.world.next_deadline();
          at.has_value() && (!next.has_value() || *at < *next)) {
        next = at;
      }
    }
    if (!next.has_value() || ending_ || (armed_.has_value() && *armed_ <= *next)) {
      return;  // A timer that fires early looks again.
    }
    armed_ = next;
    timer_.expires_at(*next);
    timer_.async_wait([this](error_code error) {
      if (!error) {
        armed_.reset();
        for (auto& [name, room] : store_.rooms) {
          room.world.expire(std::chrono::steady_clock::now());
        }
        changed();
      }
    });
  }

  void abort_here(const std::string& reason) {
    if (!store_.aborted.has_value()) {
      store_.aborted = reason;
      for (auto& [name, room] : store_.rooms) {
        room.world.fail(Errc::peer_lost, reason);
      }
    }
  }

  void end() {
    ending_ = true;
    acceptor_->close();
    timer_.cancel();
    while (!store_.strangers.empty()) {
      store_.strangers.front()->close("the store closed");
    }
    abort_here("the store at " + endpoint_text(address_, port_) + " has closed");
    for (StoreSession* session : store_.sessions) {
      session->finish();
    }
    timer_.expires_after(kLastWords);
    timer_.async_wait([this](error_code) {
      while (!store_.sessions.empty()) {
        (*store_.sessions.begin())->close("the store closed");
      }
    });
    store_.changed = [this] {
      if (store_.sessions.empty()) {
        timer_.cancel();
      }
    };
    store_.changed();
  }

  std::string address_;
  std::uint16_t port_ = 0;
  StoreState store_;
  asio::io_context io_{1};
  std::optional<Acceptor> acceptor_;
  asio::steady_timer timer_{io_};
  std::optional<Deadline> armed_;
  bool ending_ = false;
  std::mutex mutex_;
  std::condition_variable emptied_;
  std::size_t seated_ = 0;
  std::thread thread_;
};

StoreServer::StoreServer(ListenSocket socket, StoreOptions options)
    : impl_(std::make_unique<Impl>(std::move(socket), std::move(options))) {}
StoreServer::~StoreServer() = default;

const std::string& StoreServer::address() const noexcept { return impl_->address(); }
std::uint16_t StoreServer::port() const noexcept { return impl_->port(); }
std::uint64_t StoreServer::epoch() const noexcept { return impl_->epoch(); }
void StoreServer::abort(const std::string& reason) noexcept { impl_->abort(reason); }
bool StoreServer::drain(Deadline deadline) { return impl_->drain(deadline); }

}  // namespace m2n
