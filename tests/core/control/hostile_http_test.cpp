// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Random and mutated requests to the HTTP server, beside a client that must not notice.

#include <atomic>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <boost/test/unit_test.hpp>
#include <thread>

#include "core/control/http_client.hpp"
#include "tests/core/control/fake_handler.hpp"
#include "tests/core/control/raw_http.hpp"
#include "tests/support/mutate.hpp"
#include "tests/support/random_cases.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using std::chrono::milliseconds;
using testing::connect_to;
using testing::Dice;
using testing::FakeHandler;
using testing::long_deadline;
using testing::mutate;
using testing::random_bytes;

/// A request that is right, but for its token when it is @p foreign.
std::string some_request(Dice& dice, bool foreign) {
  static const std::vector<std::string> kLines = {
      "POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights",
      "POST /finish_weight_update",        "GET /weight_version",       "GET /health"};
  static const std::vector<std::string> kBodies = {
      R"({"init_info": {"schema_version": 1, "master_port": 1, "params": [{"name": "w"}]}})",
      R"({"names": ["a", "b", "\u00e9"], "version": 12, "x": [1.5e300, -0, null, true]})", "{}",
      ""};
  const std::string& body = kBodies[dice.below(kBodies.size())];
  std::string text = kLines[dice.below(kLines.size())] + " HTTP/1.1\r\nHost: h\r\n";
  text += std::string("Authorization: Bearer ") + (foreign ? "guess" : "secret") + "\r\n";
  if (dice.chance(20)) {
    text += "M2N-Timeout-Ms: 10\r\n";
  }
  if (dice.chance(10)) {
    text += "Expect: 100-continue\r\n";
  }
  if (dice.chance(30)) {
    return text + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
  }
  return text + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

void attack(const HttpServer& server, std::uint64_t seed, std::uint64_t requests, bool foreign) {
  Dice dice(seed);
  for (std::uint64_t sent = 0; sent < requests;) {
    auto socket = connect_to(server);
    std::string bytes;
    for (std::uint64_t more = 1 + dice.below(foreign ? 3 : 12); more > 0; --more, ++sent) {
      const std::string request = some_request(dice, foreign);
      bytes += dice.chance(15)   ? random_bytes(dice, 300)
               : dice.chance(60) ? mutate(dice, request)
                                 : request;
    }
    try {
      socket.write(bytes, long_deadline());
      if (dice.chance(30)) {
        char some[256];
        socket.read_some(some, sizeof some, deadline_in(milliseconds(1)));
      }
    } catch (const ConnectionBroken&) {
      // The server hung up, as it should.
    } catch (const ConnectionSlow&) {
      // It waits for the rest of a request.
    }
  }
}

/// Rounds of calls by the rightful client while @p attackers do their work.
void call_beside(const HttpServer& server, FakeHandler& handler, bool alone,
                 const std::function<void()>& attackers) {
  const auto client =
      make_http_client("http://127.0.0.1:" + std::to_string(server.port()), {.token = "secret"});
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> rounds = 0;
  std::string thrown;
  std::thread job([&] {
    try {
      while (!stop) {
        client->start_weight_update({{"mine", 1}}, long_deadline());
        const auto answer = client->update_weights({{"mine", rounds.load()}}, long_deadline());
        if (json::serialize(answer) != R"({"asked":"update"})") {
          throw std::runtime_error("a wrong answer: " + json::serialize(answer));
        }
        client->weight_state(long_deadline());
        ++rounds;
      }
    } catch (const std::exception& error) {
      thrown = error.what();
      rounds = UINT64_MAX;
    }
  });
  attackers();
  const std::uint64_t before = rounds;
  while (rounds < before + 3 && thrown.empty()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  stop = true;
  job.join();
  BOOST_TEST(thrown.empty(), thrown);
  for (const auto& [call, body] : handler.calls()) {
    BOOST_REQUIRE_MESSAGE(!alone || body.contains("mine"),
                          call << " came from a stranger: " << json::serialize(body));
  }
}

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(hostile_http)

BOOST_AUTO_TEST_CASE(hostile_requests_neither_reach_the_handler_nor_touch_a_client) {
  const std::uint64_t seed = testing::test_seed();
  const std::uint64_t requests = 5 * testing::random_cases();
  const auto handler = std::make_shared<FakeHandler>();
  // Small limits are reached soon.
  const HttpServer server(ListenSocket::reserve("127.0.0.1", 0), handler,
                          {.token = "secret", .max_body_bytes = 4096, .max_header_bytes = 1024});
  call_beside(server, *handler, true, [&] {
    std::thread other([&] { attack(server, seed, requests / 2, true); });
    attack(server, seed + 1, requests / 2, true);
    other.join();
  });
}

BOOST_AUTO_TEST_CASE(mutated_requests_with_the_token_are_served_or_refused_and_no_more) {
  const std::uint64_t seed = testing::test_seed();
  const std::uint64_t requests = testing::random_cases();
  const auto handler = std::make_shared<FakeHandler>();
  const HttpServer server(ListenSocket::reserve("127.0.0.1", 0), handler,
                          {.token = "secret", .max_calls = 1000});
  call_beside(server, *handler, false, [&] { attack(server, seed, requests, false); });
  BOOST_TEST(handler->calls().size() > 0U);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
