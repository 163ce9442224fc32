// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The HTTP client, with servers that are absent, silent, rude or slow.

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/streambuf.hpp>
#include <boost/asio/write.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>
#include <thread>

#include "core/control/http_client.hpp"
#include "tests/core/control/fake_handler.hpp"
#include "tests/core/control/raw_http.hpp"

namespace m2n {
namespace {

namespace asio = boost::asio;
namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::contains;
using testing::error_of;
using testing::FakeHandler;
using testing::long_deadline;

std::string url_of(std::uint16_t port) { return "http://127.0.0.1:" + std::to_string(port); }

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(http_client)

struct UrlCase {
  const char* url;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const UrlCase& c) { return os << c.url; }
const std::vector<UrlCase> kBadUrls = {
    {"https://host:1", "does not start with http://"},
    {"host:1", "does not start with http://"},
    {"", "does not start with http://"},
    {"http://", "names no host"},
    {"http://:80", "names no host"},
    {"http://host:", "has no port from 1 to 65535"},
    {"http://host:0", "has no port from 1 to 65535"},
    {"http://host:65536", "has no port from 1 to 65535"},
    {"http://host:80x", "has no port from 1 to 65535"},
    {"http://[::1:80", "has a bracket that is not closed"},
    {"http://host:80/a b", "has a character that cannot stand there"},
    {"http://host:80\r\nX: y", "has a character that cannot stand there"},
    {"http://user@host:80", "has a character that cannot stand there"},
};

BOOST_DATA_TEST_CASE(urls_that_are_none_are_refused_with_the_reason, bdata::make(kBadUrls), c) {
  const auto [code, text] = error_of([&] { make_http_client(c.url); });
  BOOST_TEST((code == Errc::usage));
  BOOST_TEST(contains(text, c.part), text);
  BOOST_TEST(contains(text, "give http://host:port"), text);
}

BOOST_AUTO_TEST_CASE(a_token_that_would_break_the_header_is_refused) {
  const auto [code, text] =
      error_of([] { make_http_client("http://host:1", {.token = "a\r\nX: y"}); });
  BOOST_TEST(contains(text, "a bearer token has printable characters"), text);
}

BOOST_AUTO_TEST_CASE(nobody_there_is_unavailable_and_a_late_server_is_waited_for) {
  ListenSocket socket = ListenSocket::reserve("127.0.0.1", 0);
  const std::uint16_t port = socket.port();
  { const ListenSocket gone = std::move(socket); }
  const auto impatient = make_http_client(url_of(port), {.connect_time = milliseconds(50)});
  const auto [code, text] = error_of([&] { impatient->start_weight_update({}, long_deadline()); });
  BOOST_TEST((code == Errc::unavailable));
  BOOST_TEST(text == "POST http://127.0.0.1:" + std::to_string(port) +
                         "/start_weight_update: nobody answers: Connection refused");

  const auto handler = std::make_shared<FakeHandler>();
  std::optional<HttpServer> server;
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server.emplace(ListenSocket::reserve("127.0.0.1", port), handler);
  });
  const auto patient = make_http_client(url_of(port), {.connect_time = std::chrono::minutes(2)});
  patient->start_weight_update({}, long_deadline());
  late.join();
  BOOST_TEST(handler->calls().size() == 1U);
}

BOOST_AUTO_TEST_CASE(a_server_that_never_answers_is_given_up_at_the_deadline) {
  const ListenSocket silent = ListenSocket::reserve("127.0.0.1", 0);
  const auto client = make_http_client(url_of(silent.port()));
  const auto [code, text] =
      error_of([&] { client->update_weights({}, deadline_in(milliseconds(50))); });
  BOOST_TEST((code == Errc::timed_out));
  BOOST_TEST(contains(text, "/update_weights: the deadline passed without an answer"), text);
}

BOOST_AUTO_TEST_CASE(cancel_ends_a_call_under_way) {
  const ListenSocket silent = ListenSocket::reserve("127.0.0.1", 0);
  const auto client = make_http_client(url_of(silent.port()));
  std::pair<Errc, std::string> got;
  std::thread caller([&] {
    got = error_of([&] { client->update_weights({}, deadline_in(std::chrono::hours(10))); });
  });
  std::this_thread::sleep_for(milliseconds(50));
  client->cancel("phase 'send': rank 1 died");
  caller.join();
  BOOST_TEST((got.first == Errc::peer_lost));
  BOOST_TEST(contains(got.second, "/update_weights was cancelled: phase 'send': rank 1 died"),
             got.second);
}

/// Answers one request with fixed bytes and hangs up.
class RudeServer {
 public:
  explicit RudeServer(std::string answer) {
    thread_ = std::thread([this, answer = std::move(answer)] {
      auto socket = acceptor_.accept();
      asio::streambuf request;
      boost::system::error_code ignored;
      asio::read_until(socket, request, "\r\n\r\n", ignored);
      asio::write(socket, asio::buffer(answer), ignored);
      socket.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    });
  }
  RudeServer(const RudeServer&) = delete;
  RudeServer& operator=(const RudeServer&) = delete;
  ~RudeServer() { thread_.join(); }
  std::uint16_t port() const { return acceptor_.local_endpoint().port(); }

 private:
  asio::io_context io_;
  asio::ip::tcp::acceptor acceptor_{io_, {asio::ip::make_address_v4("127.0.0.1"), 0}};
  std::thread thread_;
};

struct AnswerCase {
  const char* why;
  std::string answer;
  Errc code;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const AnswerCase& c) { return os << c.why; }
const std::vector<AnswerCase> kAnswers = {
    {"nothing", "", Errc::peer_lost, "it hung up without an answer"},
    {"no HTTP", "what?\r\n\r\n", Errc::peer_lost, "its answer cannot be read"},
    {"half an answer", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", Errc::peer_lost,
     "its answer cannot be read"},
    {"an answer without end", "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
     Errc::peer_lost, "its answer cannot be read"},
    {"another server's page", "HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>",
     Errc::unavailable, "status 404 and no JSON object of this protocol: '<html>'"},
    {"a good status without an object", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1",
     Errc::unavailable, "status 200 and no JSON object"},
    {"an error of a kind unknown here",
     "HTTP/1.1 418 I'm\r\nContent-Length: 47\r\n\r\n"
     R"({"error": {"type": "teapot", "message": "hot"}})",
     Errc::io, "hot"},
};

BOOST_DATA_TEST_CASE(answers_that_make_no_sense_are_errors, bdata::make(kAnswers), c) {
  const RudeServer server(c.answer);
  const auto client = make_http_client(url_of(server.port()));
  const auto [code, text] = error_of([&] { client->start_weight_update({}, long_deadline()); });
  BOOST_TEST((code == c.code), to_string(code));
  BOOST_TEST(contains(text, c.part), text);
}

BOOST_AUTO_TEST_CASE(a_wrong_token_is_told_in_words) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server(ListenSocket::reserve("127.0.0.1", 0), handler, {.token = "secret"});
  for (const std::string token : {"", "guess"}) {
    const auto client = make_http_client(url_of(server.port()), {.token = token});
    const auto [code, text] = error_of([&] { client->start_weight_update({}, long_deadline()); });
    BOOST_TEST(contains(text, "with the token of this server"), text);
  }
  BOOST_TEST(handler->calls().empty());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
