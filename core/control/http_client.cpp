// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/control/http_client.hpp"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/control/protocol.hpp"
#include "core/error.hpp"
#include "core/rendezvous/addresses.hpp"
#include "core/rendezvous/stream_socket.hpp"

namespace m2n {
namespace {

namespace beast = boost::beast;
namespace json = boost::json;
using boost::system::error_code;

constexpr std::chrono::milliseconds kRetry{20};
/// The server answers at the deadline, saying what was missing; this is the answer's time to come.
constexpr std::chrono::milliseconds kAnswerGrace{2000};

struct Url {
  std::string host;
  std::uint16_t port = 80;
  std::string path;  ///< Before the calls' names; without a slash at its end.
};

Url parse_url(const std::string& url) {
  const auto refuse = [&](const std::string& why) {
    return Error(Errc::usage, "control URL '" + url + "' " + why + "; give http://host:port");
  };
  constexpr std::string_view kScheme = "http://";
  if (!url.starts_with(kScheme)) {
    throw refuse("does not start with http://");
  }
  const auto legal = [](char c) {
    return c > ' ' && c < '\x7f' && c != '?' && c != '#' && c != '@';
  };
  if (!std::ranges::all_of(url, legal)) {
    throw refuse("has a character that cannot stand there");
  }
  std::string_view rest = std::string_view(url).substr(kScheme.size());
  Url parsed;
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  parsed.path = rest.substr(slash);
  while (parsed.path.ends_with('/')) {
    parsed.path.pop_back();
  }
  rest = rest.substr(0, slash);
  std::size_t colon = rest.rfind(':');
  if (rest.starts_with('[')) {
    const std::size_t bracket = rest.find(']');
    if (bracket == std::string_view::npos) {
      throw refuse("has a bracket that is not closed");
    }
    parsed.host = rest.substr(1, bracket - 1);
    colon = rest.find(':', bracket);
  } else {
    parsed.host = rest.substr(0, colon);
  }
  if (parsed.host.empty()) {
    throw refuse("names no host");
  }
  if (colon != std::string_view::npos) {
    const std::string_view digits = rest.substr(colon + 1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), parsed.port);
    if (error != std::errc() || end != digits.data() + digits.size() || parsed.port == 0) {
      throw refuse("has no port from 1 to 65535 behind its colon");
    }
  }
  return parsed;
}

/// What Beast reads from: a socket and the call's deadline.
struct CallStream {
  template <class Buffers>
  std::size_t read_some(const Buffers& buffers, error_code& error) {
    const boost::asio::mutable_buffer buffer = *boost::asio::buffer_sequence_begin(buffers);
    const std::size_t got =
        socket.read_some(static_cast<char*>(buffer.data()), buffer.size(), deadline);
    error = got == 0 ? error_code(boost::asio::error::eof) : error_code();
    return got;
  }
  template <class Buffers>
  std::size_t read_some(const Buffers& buffers) {
    error_code error;
    const std::size_t got = read_some(buffers, error);
    if (error) {
      throw boost::system::system_error(error);
    }
    return got;
  }

  StreamSocket& socket;
  Deadline deadline;
};

class HttpClient final : public ControlClient {
 public:
  HttpClient(Url url, HttpClientOptions options)
      : url_(std::move(url)), options_(std::move(options)) {}

  json::object init_weight_transfer_engine(const json::object& info, Deadline deadline) override {
    return call(http::Call::init, &info, deadline);
  }
  json::object start_weight_update(const json::object& round, Deadline deadline) override {
    return call(http::Call::start, &round, deadline);
  }
  json::object update_weights(const json::object& update, Deadline deadline) override {
    return call(http::Call::update, &update, deadline);
  }
  json::object finish_weight_update(const json::object& round, Deadline deadline) override {
    return call(http::Call::finish, &round, deadline);
  }
  WeightState weight_state(Deadline deadline) override {
    return http::read_weight_state(where(http::Call::version),
                                   call(http::Call::version, nullptr, deadline));
  }

  void cancel(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    reason_ = reason;
    for (StreamSocket* socket : under_way_) {
      socket->hang_up();
    }
  }

 private:
  /// Lets cancel() reach the socket of a call.
  class Registered {
   public:
    Registered(HttpClient& client, StreamSocket& socket) : client_(client), socket_(socket) {
      const std::lock_guard lock(client_.mutex_);
      client_.under_way_.insert(&socket_);
    }
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;
    ~Registered() {
      const std::lock_guard lock(client_.mutex_);
      client_.under_way_.erase(&socket_);
    }

   private:
    HttpClient& client_;
    StreamSocket& socket_;
  };

  std::string where(http::Call name) const {
    return std::string(http::is_get(name) ? "GET" : "POST") + " http://" +
           endpoint_text(url_.host, url_.port) + url_.path + "/" + std::string(to_string(name));
  }

  void check_cancelled(http::Call name) {
    const std::lock_guard lock(mutex_);
    if (cancelled_) {
      throw Error(Errc::peer_lost, where(name) + " was cancelled: " + reason_);
    }
  }

  json::object call(http::Call name, const json::object* body, Deadline deadline) {
    StreamSocket socket = connect(name, deadline);
    const Registered registered(*this, socket);
    check_cancelled(name);
    try {
      const Deadline patience = later(deadline, kAnswerGrace);
      socket.write(request(name, body, deadline), patience);
      CallStream stream{socket, patience};
      beast::flat_buffer buffer;
      beast::http::response_parser<beast::http::string_body> parser;
      parser.body_limit(options_.max_answer_bytes);
      error_code error;
      beast::http::read(stream, buffer, parser, error);
      if (error) {
        throw ConnectionBroken(error == beast::http::error::end_of_stream
                                   ? "it hung up without an answer"
                                   : "its answer cannot be read: " + error.message());
      }
      return http::read_answer(where(name), parser.get().result_int(), parser.get().body());
    } catch (const ConnectionSlow&) {
      throw Error(Errc::timed_out, where(name) + ": the deadline passed without an answer");
    } catch (const ConnectionBroken& error) {
      check_cancelled(name);
      throw Error(Errc::peer_lost, where(name) + ": the server was lost: " + error.what());
    }
  }

  StreamSocket connect(http::Call name, Deadline deadline) {
    const Deadline until = std::min(deadline, deadline_in(options_.connect_time));
    for (;;) {
      check_cancelled(name);
      try {
        return StreamSocket::open(url_.host, url_.port, until);
      } catch (const ConnectionSlow& error) {
        throw Error(Errc::unavailable, where(name) + ": nobody answers: " + error.what());
      } catch (const ConnectionBroken& error) {
        if (std::chrono::steady_clock::now() + kRetry >= until) {
          throw Error(Errc::unavailable, where(name) + ": nobody answers: " + error.what());
        }
      }
      std::this_thread::sleep_for(kRetry);
    }
  }

  std::string request(http::Call name, const json::object* body, Deadline deadline) const {
    const auto left =
        std::chrono::floor<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    std::string text = http::is_get(name) ? "GET " : "POST ";
    text += url_.path + "/" + std::string(to_string(name)) + " HTTP/1.1\r\n";
    text += "Host: " + endpoint_text(url_.host, url_.port) + "\r\n";
    text += "Connection: close\r\nAccept: application/json\r\n";
    text += "M2N-Timeout-Ms: " + std::to_string(std::max<std::int64_t>(left.count(), 1)) + "\r\n";
    if (!options_.token.empty()) {
      text += "Authorization: Bearer " + options_.token + "\r\n";
    }
    const std::string payload = body != nullptr ? json::serialize(*body) : "";
    if (body != nullptr) {
      text +=
          "Content-Type: application/json\r\nContent-Length: " + std::to_string(payload.size()) +
          "\r\n";
    }
    return text + "\r\n" + payload;
  }

  Url url_;
  HttpClientOptions options_;
  std::mutex mutex_;
  bool cancelled_ = false;
  std::string reason_;
  std::set<StreamSocket*> under_way_;
};

}  // namespace

std::unique_ptr<ControlClient> make_http_client(const std::string& url, HttpClientOptions options) {
  if (!std::ranges::all_of(options.token, [](char c) { return c > ' ' && c < '\x7f'; })) {
    throw Error(Errc::usage, "a bearer token has printable characters and no blanks");
  }
  return std::make_unique<HttpClient>(parse_url(url), std::move(options));
}

}  // namespace m2n
