// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/control/http_server.hpp"

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <list>
#include <thread>
#include <utility>

#include "core/control/http_session.hpp"
#include "core/error.hpp"
#include "core/rendezvous/acceptor.hpp"
#include "core/rendezvous/addresses.hpp"

namespace m2n {

namespace asio = boost::asio;
using asio::ip::tcp;

class HttpServer::Impl {
 public:
  Impl(ListenSocket socket, std::shared_ptr<ControlHandler> handler, HttpServerOptions options)
      : address_(socket.address()), port_(socket.port()) {
    expects(handler != nullptr, "a handler to serve");
    if (options.token.empty() && !socket.loopback()) {
      throw Error(Errc::bad_argument, "the control server would listen on " +
                                          endpoint_text(address_, port_) +
                                          " for anybody; give it a token, or listen on 127.0.0.1");
    }
    state_.options = std::move(options);
    state_.handler = std::move(handler);
    state_.run = [this](std::function<http::Answer()> work,
                        std::function<void(http::Answer)> done) {
      run(std::move(work), std::move(done));
    };
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
      io_.stop();
    }
    thread_.join();
    for (std::thread& call : calls_) {
      call.join();
    }
  }

  const std::string& address() const noexcept { return address_; }
  std::uint16_t port() const noexcept { return port_; }

 private:
  void welcome(tcp::socket client) {
    if (state_.sessions.size() >= state_.options.max_connections) {
      push_out();
    }
    if (state_.sessions.size() < state_.options.max_connections) {
      std::make_shared<HttpSession>(std::move(client), state_)->start();
    }
  }

  void push_out() {
    const auto idle = std::ranges::find_if(
        state_.sessions, [](const HttpSession* session) { return !session->calling(); });
    if (idle != state_.sessions.end()) {
      (*idle)->close();
    }
  }

  void run(std::function<http::Answer()> work, std::function<void(http::Answer)> done) {
    const auto place = calls_.emplace(calls_.end());
    try {
      *place = std::thread([this, place, work = std::move(work), done] {
        http::Answer answer = work();
        asio::post(io_, [this, place, done, answer = std::move(answer)]() mutable {
          place->join();
          calls_.erase(place);
          done(std::move(answer));
        });
      });
    } catch (const std::system_error&) {
      calls_.erase(place);
      done(http::error_answer(503, "unavailable", "this process can start no more threads"));
    }
  }

  void end() {
    acceptor_->close();
    while (!state_.sessions.empty()) {
      state_.sessions.front()->close();
    }
    guard_.reset();
    io_.stop();
  }

  std::string address_;
  std::uint16_t port_ = 0;
  HttpState state_;
  std::list<std::thread> calls_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> guard_{io_.get_executor()};
  std::optional<Acceptor> acceptor_;
  std::thread thread_;
};

HttpServer::HttpServer(ListenSocket socket, std::shared_ptr<ControlHandler> handler,
                       HttpServerOptions options)
    : impl_(std::make_unique<Impl>(std::move(socket), std::move(handler), std::move(options))) {}
HttpServer::~HttpServer() = default;

const std::string& HttpServer::address() const noexcept { return impl_->address(); }
std::uint16_t HttpServer::port() const noexcept { return impl_->port(); }

}  // namespace m2n
