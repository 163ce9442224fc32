// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One client's connection to the HTTP server. Everything here lives on the server's thread.

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "core/control/http_server.hpp"
#include "core/control/protocol.hpp"

namespace m2n {

class HttpSession;

/// What the sessions of a server share.
struct HttpState {
  HttpServerOptions options;
  std::shared_ptr<ControlHandler> handler;
  std::list<HttpSession*> sessions;  ///< Oldest first.
  std::size_t calls = 0;             ///< Under way.
  /// Runs the first function on a thread of its own, and then the second one on the server's.
  std::function<void(std::function<http::Answer()>, std::function<void(http::Answer)>)> run;
};

/// Alive while something is under way on the connection.
class HttpSession : public std::enable_shared_from_this<HttpSession> {
 public:
  HttpSession(boost::asio::ip::tcp::socket socket, HttpState& server);
  HttpSession(const HttpSession&) = delete;
  HttpSession& operator=(const HttpSession&) = delete;

  /// Waits for a request.
  void start();
  void close();
  bool calling() const noexcept { return calling_; }

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  using Response = boost::beast::http::response<boost::beast::http::string_body>;

  void have_header(boost::system::error_code error);
  /// What is wrong with a request whose header says enough.
  std::optional<http::Answer> refusal(std::optional<http::Call> call) const;
  bool authorized() const;
  void read_body();
  void have_body(boost::system::error_code error);
  void run_call();
  void answer(http::Answer answer, bool keep_alive);
  void have_answered(boost::system::error_code error, bool keep_alive);
  void limit(std::chrono::milliseconds time, std::function<void()> late);
  void refuse_unreadable(boost::system::error_code error);
  /// Reads away what a refused client still sends, lest a reset destroys the answer.
  void linger();

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  HttpState& server_;
  std::list<HttpSession*>::iterator place_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  std::optional<Response> response_;
  std::array<char, 4096> scrap_{};
  std::optional<http::Call> call_;
  std::uint64_t step_ = 0;  ///< Of what the timer limits.
  bool calling_ = false;
  bool answering_ = false;
  bool closed_ = false;
};

}  // namespace m2n
