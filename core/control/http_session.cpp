// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/control/http_session.hpp"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/write.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <string_view>
#include <utility>

#include "core/rendezvous/secrets.hpp"

namespace m2n {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace field = boost::beast::http;
using boost::system::error_code;

namespace {

constexpr std::string_view kTimeField = "M2N-Timeout-Ms";
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
/// For a refused client to stop sending.
constexpr std::chrono::milliseconds kLinger{2000};

}  // namespace

HttpSession::HttpSession(asio::ip::tcp::socket socket, HttpState& server)
    : socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      server_(server),
      place_(server.sessions.insert(server.sessions.end(), this)),
      buffer_(server.options.max_header_bytes + (64U << 10U)) {}

void HttpSession::limit(std::chrono::milliseconds time, std::function<void()> late) {
  const auto self = shared_from_this();
  timer_.expires_after(time);
  // A limit that was reached as the next step began is no longer one.
  timer_.async_wait([self, late = std::move(late), step = ++step_](error_code error) {
    if (!error && !self->closed_ && step == self->step_) {
      late();
    }
  });
}

void HttpSession::close() {
  if (std::exchange(closed_, true)) {
    return;
  }
  const auto self = shared_from_this();
  error_code ignored;
  timer_.cancel();
  socket_.close(ignored);
  server_.sessions.erase(place_);
}

void HttpSession::start() {
  parser_.emplace();
  parser_->header_limit(server_.options.max_header_bytes);
  parser_->body_limit(server_.options.max_body_bytes);
  const auto self = shared_from_this();
  limit(server_.options.header_time, [this] {
    if (parser_->got_some()) {
      answer(http::error_answer(408, "timed_out", "the request's header took too long"), false);
    } else {
      close();
    }
  });
  field::async_read_header(socket_, buffer_, *parser_,
                           [self](error_code error, std::size_t) { self->have_header(error); });
}

void HttpSession::refuse_unreadable(error_code error) {
  if (error.category() != field::make_error_code(field::error::bad_method).category() ||
      error == field::error::end_of_stream || error == field::error::partial_message) {
    close();
    return;
  }
  if (error == field::error::body_limit) {
    answer(http::error_answer(413, "usage",
                              "the body is longer than " +
                                  std::to_string(server_.options.max_body_bytes) +
                                  " bytes, which is the limit of this server"),
           false);
  } else if (error == field::error::header_limit || error == field::error::buffer_overflow) {
    answer(http::error_answer(431, "usage",
                              "the request's header is longer than " +
                                  std::to_string(server_.options.max_header_bytes) +
                                  " bytes, which is the limit of this server"),
           false);
  } else {
    answer(http::error_answer(400, "usage", "the request is not HTTP: " + error.message()), false);
  }
}

bool HttpSession::authorized() const {
  if (server_.options.token.empty()) {
    return true;
  }
  constexpr std::string_view kScheme = "bearer ";
  const std::string_view given = parser_->get()[field::field::authorization];
  return given.size() > kScheme.size() &&
         beast::iequals(given.substr(0, kScheme.size()), kScheme) &&
         equal_secrets(given.substr(kScheme.size()), server_.options.token);
}

std::optional<http::Answer> HttpSession::refusal(std::optional<http::Call> call) const {
  const auto& request = parser_->get();
  if (call != http::Call::health && !authorized()) {
    return http::error_answer(401, "unauthorized",
                              "the request needs the header 'Authorization: Bearer <token>' with "
                              "the token of this server");
  }
  if (request.find(field::field::origin) != request.end()) {
    return http::error_answer(403, "forbidden", "this server does not talk to browsers");
  }
  if (!call.has_value()) {
    return http::error_answer(404, "usage",
                              "there is no '" + std::string(request.target()) +
                                  "' here; there are POST /init_weight_transfer_engine, "
                                  "/start_weight_update, /update_weights, /finish_weight_update, "
                                  "and GET /weight_version, /health");
  }
  const field::verb verb = http::is_get(*call) ? field::verb::get : field::verb::post;
  if (request.method() != verb) {
    return http::error_answer(405, "usage",
                              "/" + std::string(to_string(*call)) + " takes " +
                                  std::string(field::to_string(verb)) + " requests only");
  }
  if (const auto given = request.find(std::string(kTimeField)); given != request.end()) {
    std::uint64_t time_ms = 0;
    const std::string_view text = given->value();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), time_ms);
    if (error != std::errc() || end != text.data() + text.size() || time_ms == 0) {
      return http::error_answer(400, "usage",
                                std::string(kTimeField) +
                                    " must be a whole number of "
                                    "milliseconds, 1 or more");
    }
  }
  return std::nullopt;
}

void HttpSession::have_header(error_code error) {
  if (closed_ || answering_) {
    return;  // It was told already that it took too long.
  }
  if (error) {
    refuse_unreadable(error);
    return;
  }
  const auto& request = parser_->get();
  call_ = http::find_call(request.target());
  if (std::optional<http::Answer> refused = refusal(call_); refused.has_value()) {
    answer(*std::move(refused), false);
    return;
  }
  const auto self = shared_from_this();
  limit(server_.options.body_time, [this] {
    answer(http::error_answer(408, "timed_out", "the request's body took too long"), false);
  });
  if (beast::iequals(request[field::field::expect], "100-continue")) {
    asio::async_write(socket_, asio::buffer(kContinue), [self](error_code failed, std::size_t) {
      if (failed) {
        self->close();
      } else {
        self->read_body();
      }
    });
  } else {
    read_body();
  }
}

void HttpSession::read_body() {
  const auto self = shared_from_this();
  field::async_read(socket_, buffer_, *parser_,
                    [self](error_code error, std::size_t) { self->have_body(error); });
}

void HttpSession::have_body(error_code error) {
  if (closed_ || answering_) {
    return;
  }
  if (error) {
    refuse_unreadable(error);
    return;
  }
  ++step_;
  timer_.cancel();
  run_call();
}

void HttpSession::run_call() {
  const auto& request = parser_->get();
  const http::Call call = *call_;
  const bool keep_alive = request.keep_alive();
  std::chrono::milliseconds time = server_.options.call_time;
  if (const std::string_view text = request[std::string(kTimeField)]; !text.empty()) {
    std::uint64_t time_ms = 0;
    std::from_chars(text.data(), text.data() + text.size(), time_ms);
    time = std::chrono::milliseconds(static_cast<std::chrono::milliseconds::rep>(
        std::min(time_ms, static_cast<std::uint64_t>(time.count()))));
  }
  if (http::is_get(call)) {
    answer(http::run_call(*server_.handler, call, {}, deadline_in(time)), keep_alive);
    return;
  }
  if (server_.calls >= server_.options.max_calls) {
    answer(http::error_answer(503, "unavailable",
                              std::to_string(server_.calls) +
                                  " calls are under way, which is the limit of this server"),
           keep_alive);
    return;
  }
  calling_ = true;
  ++server_.calls;
  const auto self = shared_from_this();
  const Deadline deadline = deadline_in(time);
  const auto body = std::make_shared<const std::string>(std::move(parser_->get().body()));
  server_.run([handler = server_.handler, call, body,
               deadline] { return http::run_call(*handler, call, *body, deadline); },
              [self, keep_alive](http::Answer result) {
                self->calling_ = false;
                --self->server_.calls;
                self->answer(std::move(result), keep_alive);
              });
}

void HttpSession::answer(http::Answer answer, bool keep_alive) {
  if (closed_ || answering_) {
    return;
  }
  answering_ = true;
  response_.emplace(static_cast<field::status>(answer.status), parser_->get().version());
  response_->set(field::field::content_type, "application/json");
  if (answer.status == 401) {
    response_->set(field::field::www_authenticate, "Bearer");
  } else if (answer.status == 405) {
    response_->set(field::field::allow, http::is_get(*call_) ? "GET" : "POST");
  }
  response_->keep_alive(keep_alive);
  response_->body() = boost::json::serialize(answer.body) + "\n";
  response_->prepare_payload();
  const auto self = shared_from_this();
  limit(server_.options.body_time, [this] { close(); });
  field::async_write(socket_, *response_, [self, keep_alive](error_code error, std::size_t) {
    self->have_answered(error, keep_alive);
  });
}

void HttpSession::have_answered(error_code error, bool keep_alive) {
  if (error || closed_) {
    close();
    return;
  }
  if (keep_alive) {
    answering_ = false;
    start();
    return;
  }
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  limit(kLinger, [this] { close(); });
  linger();
}

void HttpSession::linger() {
  const auto self = shared_from_this();
  socket_.async_read_some(asio::buffer(scrap_), [self](error_code error, std::size_t) {
    if (error) {
      self->close();
    } else if (!self->closed_) {
      self->linger();
    }
  });
}

}  // namespace m2n
