// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The HTTP server, spoken to byte by byte.

#include <boost/json/serialize.hpp>
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

namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::ask;
using testing::connect_to;
using testing::contains;
using testing::FakeHandler;
using testing::Gate;
using testing::kBearer;
using testing::long_deadline;
using testing::read_all;
using testing::request;

HttpServer make_server(const std::shared_ptr<FakeHandler>& handler,
                       HttpServerOptions options = {}) {
  options.token = "secret";
  return {ListenSocket::reserve("127.0.0.1", 0), handler, std::move(options)};
}

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(http_server)

struct Row {
  const char* why;
  std::string request;
  const char* status;
  const char* part;       ///< Of the answer.
  std::size_t calls = 0;  ///< That reached the handler.
};
std::ostream& operator<<(std::ostream& os, const Row& row) { return os << row.why; }

const std::string kUpdate = "POST /update_weights";
const std::string kStart = "POST /start_weight_update";
const std::string kNames = R"({"names": ["a"]})";

const std::vector<Row> kRows = {
    {"a call", request(kUpdate, kBearer, kNames), "200 OK", R"({"asked":"update"})", 1},
    {"a lower-case scheme", request(kUpdate, "authorization: bearer secret\r\n", kNames), "200 OK",
     "asked", 1},
    {"a form's content type, as curl sends it",
     request(kUpdate, std::string(kBearer) + "Content-Type: application/x-www-form-urlencoded\r\n",
             kNames),
     "200 OK", "asked", 1},
    {"no body where none is needed", request(kStart, kBearer, ""), "200 OK", "asked", 1},
    {"a query behind the route", request(kStart + "?reset=1", kBearer, "{}"), "200 OK", "asked", 1},
    {"an old client",
     "POST /start_weight_update HTTP/1.0\r\n" + std::string(kBearer) +
         "Content-Length: 2\r\n\r\n{}",
     "200 OK", "asked", 1},
    {"a chunked body",
     kUpdate + " HTTP/1.1\r\nConnection: close\r\n" + kBearer +
         "Transfer-Encoding: chunked\r\n\r\n3\r\n{\"n\r\n5\r\n\": 1}\r\n0\r\n\r\n",
     "200 OK", "asked", 1},
    {"no token", request(kUpdate, "", kNames), "401 Unauthorized", "WWW-Authenticate: Bearer"},
    {"a wrong token", request(kUpdate, "Authorization: Bearer secreT\r\n", kNames),
     "401 Unauthorized", "with the token of this server"},
    {"a token that begins right", request(kUpdate, "Authorization: Bearer secret1\r\n", kNames),
     "401 Unauthorized", "unauthorized"},
    {"a part of the token", request(kUpdate, "Authorization: Bearer secre\r\n", kNames),
     "401 Unauthorized", "unauthorized"},
    {"another scheme", request(kUpdate, "Authorization: Basic secret\r\n", kNames),
     "401 Unauthorized", "unauthorized"},
    {"a browser", request(kUpdate, std::string(kBearer) + "Origin: http://evil\r\n", kNames),
     "403 Forbidden", "does not talk to browsers"},
    {"no such route", request("POST /update_weight", kBearer, kNames), "404 Not Found",
     "there is no '/update_weight' here; there are POST /init_weight_transfer_engine"},
    {"the wrong verb", request("GET /update_weights", kBearer, ""), "405 Method Not Allowed",
     "Allow: POST"},
    {"the other wrong verb", request("POST /health", kBearer, ""), "405 Method Not Allowed",
     "/health takes GET requests only"},
    {"a body that is no JSON", request(kUpdate, kBearer, "names=a"), "400 Bad Request",
     "the body of update_weights"},
    {"a body that is no object", request(kUpdate, kBearer, "[1]"), "400 Bad Request",
     "the body of update_weights must be a JSON object"},
    {"a key twice", request(kUpdate, kBearer, R"({"a": 1, "a": 2})"), "400 Bad Request",
     "has the key 'a' twice"},
    {"no body where one is needed", request(kUpdate, kBearer, ""), "400 Bad Request",
     "the body of update_weights"},
    {"an envelope that holds no object", request(kUpdate, kBearer, R"({"update_info": 3})"),
     "400 Bad Request", "'update_info' must be a JSON object"},
    {"deep nesting", request(kUpdate, kBearer, std::string(100'000, '[')), "400 Bad Request",
     "the body of update_weights"},
    {"a deadline that is none",
     request(kUpdate, std::string(kBearer) + "M2N-Timeout-Ms: soon\r\n", kNames), "400 Bad Request",
     "M2N-Timeout-Ms must be a whole number of milliseconds"},
    {"a deadline of nothing",
     request(kUpdate, std::string(kBearer) + "M2N-Timeout-Ms: 0\r\n", kNames), "400 Bad Request",
     "1 or more"},
    {"a body over the limit", request(kUpdate, kBearer, std::string(2001, ' ')),
     "413 Payload Too Large", "longer than 2000 bytes"},
    {"a body that claims to be endless",
     kUpdate + " HTTP/1.1\r\n" + kBearer + "Content-Length: 18446744073709551615\r\n\r\n",
     "413 Payload Too Large", "longer than 2000 bytes"},
    {"a chunk over the limit",
     kUpdate + " HTTP/1.1\r\n" + kBearer + "Transfer-Encoding: chunked\r\n\r\n7fffffff\r\n{}",
     "413 Payload Too Large", "longer than 2000 bytes"},
    {"a header over the limit", request(kUpdate, "X: " + std::string(5000, 'x') + "\r\n", kNames),
     "431 Request Header Fields Too Large", "longer than 1000 bytes"},
    {"no HTTP", "hello there\r\n\r\n", "400 Bad Request", "the request is not HTTP"},
    {"two lengths",
     kUpdate + " HTTP/1.1\r\n" + kBearer + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
     "400 Bad Request", "the request is not HTTP"},
    {"a length that is none", kUpdate + " HTTP/1.1\r\n" + kBearer + "Content-Length: -1\r\n\r\n{}",
     "400 Bad Request", "the request is not HTTP"},
};

BOOST_DATA_TEST_CASE(requests_are_answered_with_the_right_status, bdata::make(kRows), row) {
  const auto handler = std::make_shared<FakeHandler>();
  const bool deep = std::string(row.why) == "deep nesting";
  const HttpServer server =
      make_server(handler, {.max_body_bytes = deep ? 1'000'000U : 2000U, .max_header_bytes = 1000});
  const std::string answer = ask(server, row.request);
  BOOST_TEST(contains(answer.substr(0, answer.find('\r')), row.status), answer);
  BOOST_TEST(contains(answer, row.part), answer);
  BOOST_TEST(contains(answer, "Content-Type: application/json\r\n"), answer);
  BOOST_TEST(!contains(answer, "<reset>"), answer);
  BOOST_TEST(handler->calls().size() == row.calls);
}

BOOST_AUTO_TEST_CASE(the_envelopes_of_inference_servers_are_opened) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server = make_server(handler);
  ask(server,
      request("POST /init_weight_transfer_engine", kBearer, R"({"init_info": {"world_size": 6}})"));
  ask(server, request(kUpdate, kBearer, R"({"update_info": {"names": ["a"]}})"));
  ask(server, request(kUpdate, kBearer, R"({"update_info": {}, "names": []})"));
  const auto calls = handler->calls();
  BOOST_REQUIRE(calls.size() == 3U);
  BOOST_TEST(boost::json::serialize(calls[0].second) == R"({"world_size":6})");
  BOOST_TEST(boost::json::serialize(calls[1].second) == R"({"names":["a"]})");
  BOOST_TEST(boost::json::serialize(calls[2].second) == R"({"update_info":{},"names":[]})");
}

BOOST_AUTO_TEST_CASE(health_needs_no_token_and_follows_the_weights) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server = make_server(handler);
  handler->set_state({3, false, "round 4 failed: rank 2 died"});
  const std::string sick = ask(server, request("GET /health", "", ""));
  BOOST_TEST(contains(sick, "503 Service Unavailable"), sick);
  BOOST_TEST(contains(sick, "round 4 failed: rank 2 died"), sick);
  handler->set_state({4, true, ""});
  BOOST_TEST(contains(ask(server, request("GET /health", "", "")), "200 OK"));
  BOOST_TEST(contains(ask(server, request("GET /weight_version", "", "")), "401"));
  const std::string version = ask(server, request("GET /weight_version", kBearer, ""));
  BOOST_TEST(contains(version, R"({"weight_version":4,"serving":true,"reason":""})"), version);
}

BOOST_AUTO_TEST_CASE(a_connection_carries_several_requests_also_all_at_once) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server = make_server(handler);
  const std::string kept = kUpdate + " HTTP/1.1\r\n" + kBearer +
                           "Content-Length: " + std::to_string(kNames.size()) + "\r\n\r\n" + kNames;
  const std::string answers = ask(server, kept + kept + request(kStart, kBearer, "{}"));
  BOOST_TEST(handler->calls().size() == 3U);
  BOOST_TEST(contains(answers, R"({"asked":"start"})"), answers);
}

BOOST_AUTO_TEST_CASE(a_client_that_asks_first_is_told_to_continue) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server = make_server(handler);
  auto socket = connect_to(server);
  socket.write(kUpdate + " HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\n" + kBearer +
                   "Content-Length: " + std::to_string(kNames.size()) + "\r\n\r\n",
               long_deadline());
  std::string first(25, '\0');
  socket.read(first.data(), first.size(), long_deadline());
  BOOST_TEST(first == "HTTP/1.1 100 Continue\r\n\r\n");
  socket.write(kNames, long_deadline());
  BOOST_TEST(contains(read_all(socket), "200 OK"));
}

BOOST_AUTO_TEST_CASE(slow_clients_are_told_and_hung_up_on) {
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server =
      make_server(handler, {.header_time = milliseconds(1'000), .body_time = milliseconds(1'000)});
  auto silent = connect_to(server);
  auto header = connect_to(server);
  auto body = connect_to(server);
  header.write("POST /upd", long_deadline());
  body.write(kUpdate + " HTTP/1.1\r\n" + kBearer + "Content-Length: 100\r\n\r\n{", long_deadline());
  BOOST_TEST(read_all(silent) == "");
  BOOST_TEST(contains(read_all(header), "408 Request Timeout"));
  const std::string late = read_all(body);
  BOOST_TEST((contains(late, "408 Request Timeout") && contains(late, "body took too long")), late);
  // One that keeps sending, but too slowly, gains nothing by it.
  auto dripping = connect_to(server);
  std::thread drip([&] {
    try {
      for (int byte = 0; byte < 2000; ++byte) {
        dripping.write("X", long_deadline());
        std::this_thread::sleep_for(milliseconds(5));
      }
    } catch (const ConnectionBroken&) {
      return;  // As it should be.
    }
  });
  BOOST_TEST(contains(read_all(dripping), "408 Request Timeout"));
  dripping.hang_up();
  drip.join();
  BOOST_TEST(handler->calls().empty());
}

BOOST_AUTO_TEST_CASE(calls_over_the_limit_are_told_so_while_the_state_is_still_answered) {
  Gate release;
  std::atomic<int> inside = 0;
  const auto handler = std::make_shared<FakeHandler>([&](const std::string&, Deadline) {
    ++inside;
    release.wait(long_deadline());
  });
  const HttpServer server = make_server(handler, {.max_calls = 2});
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&] { ask(server, request(kStart, kBearer, "")); });
  }
  while (inside < 2) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const std::string third = ask(server, request(kStart, kBearer, ""));
  BOOST_TEST(contains(third, "503 Service Unavailable"), third);
  BOOST_TEST(contains(third, "2 calls are under way"), third);
  BOOST_TEST(contains(ask(server, request("GET /weight_version", kBearer, "")), "200 OK"));
  release.open();
  for (std::thread& caller : callers) {
    caller.join();
  }
  BOOST_TEST(contains(ask(server, request(kStart, kBearer, "")), "200 OK"));
}

BOOST_AUTO_TEST_CASE(a_crowd_of_idle_connections_keeps_nobody_out_and_ends_no_call) {
  Gate entered;
  Gate release;
  const auto handler = std::make_shared<FakeHandler>([&](const std::string& call, Deadline) {
    if (call == "update") {
      entered.open();
      release.wait(long_deadline());
    }
  });
  const HttpServer server = make_server(handler, {.max_connections = 4});
  std::string long_call;
  std::thread caller([&] { long_call = ask(server, request(kUpdate, kBearer, kNames)); });
  BOOST_TEST(entered.wait(long_deadline()));
  std::vector<StreamSocket> crowd;
  for (int client = 0; client < 20; ++client) {
    crowd.push_back(connect_to(server));
  }
  BOOST_TEST(contains(ask(server, request(kStart, kBearer, "")), "200 OK"));
  release.open();
  caller.join();
  BOOST_TEST(contains(long_call, "200 OK"), long_call);
}

BOOST_AUTO_TEST_CASE(a_client_that_goes_away_during_its_call_harms_nobody) {
  Gate entered;
  Gate release;
  const auto handler = std::make_shared<FakeHandler>([&](const std::string&, Deadline) {
    entered.open();
    release.wait(long_deadline());
  });
  const HttpServer server = make_server(handler);
  {
    auto socket = connect_to(server);
    socket.write(request(kStart, kBearer, ""), long_deadline());
    BOOST_TEST(entered.wait(long_deadline()));
  }
  release.open();
  BOOST_TEST(contains(ask(server, request(kStart, kBearer, "")), "200 OK"));
}

BOOST_AUTO_TEST_CASE(the_end_of_the_server_waits_for_its_calls_and_hangs_up) {
  Gate entered;
  std::atomic<bool> ended = false;
  const auto handler = std::make_shared<FakeHandler>([&](const std::string&, Deadline) {
    entered.open();
    std::this_thread::sleep_for(milliseconds(50));
    ended = true;
  });
  std::optional<HttpServer> server;
  server.emplace(ListenSocket::reserve("127.0.0.1", 0), handler, HttpServerOptions{});
  const auto client = make_http_client("http://127.0.0.1:" + std::to_string(server->port()));
  std::string text;
  std::thread caller([&] {
    try {
      client->start_weight_update({}, long_deadline());
      text = "answered";
    } catch (const Error& error) {
      text = error.what();
    }
  });
  BOOST_TEST(entered.wait(long_deadline()));
  server.reset();
  BOOST_TEST(ended);
  caller.join();
  BOOST_TEST(contains(text, "the server was lost"), text);
}

BOOST_AUTO_TEST_CASE(a_server_for_everybody_needs_a_token) {
  const auto handler = std::make_shared<FakeHandler>();
  BOOST_CHECK_EXCEPTION(HttpServer(ListenSocket::reserve("0.0.0.0", 0), handler), Error,
                        [](const Error& error) {
                          return contains(error.what(), "give it a token, or listen on 127.0.0.1");
                        });
  const HttpServer guarded(ListenSocket::reserve("0.0.0.0", 0), handler, {.token = "x"});
  BOOST_TEST(guarded.port() != 0);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
