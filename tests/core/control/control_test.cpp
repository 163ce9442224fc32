// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The control plane's calls, in process and over HTTP, as clients see them.

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <limits>
#include <thread>

#include "core/control/control.hpp"
#include "core/control/http_client.hpp"
#include "core/control/http_server.hpp"
#include "tests/core/control/fake_handler.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using std::chrono::milliseconds;
using testing::error_of;
using testing::FakeHandler;
using testing::Gate;

Deadline long_deadline() { return deadline_in(std::chrono::seconds(120)); }

/// A deployment and a client of it, joined in process or over HTTP.
struct Deployment {
  explicit Deployment(bool over_http, FakeHandler::Hook hook = {})
      : handler(std::make_shared<FakeHandler>(std::move(hook))) {
    if (over_http) {
      server.emplace(ListenSocket::reserve("127.0.0.1", 0), handler,
                     HttpServerOptions{.token = "secret"});
      url = "http://127.0.0.1:" + std::to_string(server->port());
      client = make_http_client(url, {.token = "secret"});
    } else {
      client = make_local_client(handler);
    }
  }

  std::shared_ptr<FakeHandler> handler;
  std::optional<HttpServer> server;
  std::string url;
  std::unique_ptr<ControlClient> client;
};

const std::vector<bool> kWays = {false, true};

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(control)

BOOST_DATA_TEST_CASE(the_four_calls_reach_the_handler_with_their_bodies, bdata::make(kWays), http) {
  Deployment deployment(http);
  const json::object info = {{"schema_version", 1},
                             {"master_port", 29500},
                             {"params", json::array{json::object{{"name", "w\"\\\n\u00e9"}}}},
                             {"big", std::numeric_limits<std::uint64_t>::max()}};
  const json::object update = {{"names", json::array{"a", "b"}}};
  BOOST_TEST(json::serialize(deployment.client->init_weight_transfer_engine(
                 info, long_deadline())) == R"({"asked":"init"})");
  deployment.client->start_weight_update({}, long_deadline());
  deployment.client->update_weights(update, long_deadline());
  deployment.client->finish_weight_update({{"version", 7}}, long_deadline());
  const auto calls = deployment.handler->calls();
  BOOST_REQUIRE(calls.size() == 4U);
  BOOST_TEST(calls[0].first == "init");
  BOOST_TEST(json::serialize(calls[0].second) == json::serialize(info));
  BOOST_TEST(calls[1].first == "start");
  BOOST_TEST(calls[1].second.empty());
  BOOST_TEST(calls[2].first == "update");
  BOOST_TEST(json::serialize(calls[2].second) == json::serialize(update));
  BOOST_TEST(calls[3].first == "finish");
  BOOST_TEST(json::serialize(calls[3].second) == R"({"version":7})");
}

BOOST_DATA_TEST_CASE(a_handlers_error_arrives_with_its_code_and_text, bdata::make(kWays), http) {
  for (const Errc code : {Errc::usage, Errc::bad_argument, Errc::bad_plan, Errc::unavailable,
                          Errc::peer_lost, Errc::timed_out, Errc::io}) {
    Deployment deployment(http, [&](const std::string&, Deadline) {
      throw Error(code, "phase 'x': \"ranks\" missing: 3");
    });
    const auto [got, text] = error_of([&] {
      deployment.client->update_weights({{"names", json::array()}}, long_deadline());
    });
    BOOST_TEST((got == code), to_string(got));
    BOOST_TEST(text == "phase 'x': \"ranks\" missing: 3");
  }
}

BOOST_DATA_TEST_CASE(the_weight_state_is_told_while_a_call_is_under_way, bdata::make(kWays), http) {
  Gate entered;
  Gate release;
  Deployment deployment(http, [&](const std::string&, Deadline) {
    entered.open();
    release.wait(long_deadline());
  });
  deployment.handler->set_state({41, false, "a round is under way"});
  std::thread round([&] {
    deployment.client->update_weights({{"names", json::array()}}, long_deadline());
  });
  BOOST_TEST(entered.wait(long_deadline()));
  const WeightState state = deployment.client->weight_state(long_deadline());
  BOOST_TEST(state.version == 41U);
  BOOST_TEST(!state.serving);
  BOOST_TEST(state.reason == "a round is under way");
  release.open();
  round.join();
}

BOOST_DATA_TEST_CASE(several_calls_run_at_once, bdata::make(kWays), http) {
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0;
  Deployment deployment(http, [&](const std::string&, Deadline) {
    std::unique_lock lock(mutex);
    ++inside;
    changed.notify_all();
    if (!changed.wait_until(lock, long_deadline(), [&] { return inside == 4; })) {
      throw Error(Errc::timed_out, "alone");
    }
  });
  std::vector<std::thread> callers;
  std::vector<std::string> texts(4);
  for (std::string& text : texts) {
    callers.emplace_back([&] {
      text = error_of([&] { deployment.client->start_weight_update({}, long_deadline()); }).second;
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (const std::string& text : texts) {
    BOOST_TEST(text == "nothing was thrown");
  }
}

BOOST_DATA_TEST_CASE(a_call_knows_its_clients_deadline, bdata::make(kWays), http) {
  Deadline seen;
  Deployment deployment(http, [&](const std::string&, Deadline deadline) {
    seen = deadline;
    while (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    throw Error(Errc::timed_out, "phase 'move': the deadline passed; ranks missing: 2");
  });
  const Deadline mine = deadline_in(milliseconds(1'000));
  const auto [code, text] = error_of([&] { deployment.client->finish_weight_update({}, mine); });
  BOOST_TEST((code == Errc::timed_out));
  BOOST_TEST(text == "phase 'move': the deadline passed; ranks missing: 2");
  BOOST_TEST((seen <= mine + milliseconds(60'000)));
}

BOOST_DATA_TEST_CASE(a_cancelled_client_calls_no_more, bdata::make(kWays), http) {
  Deployment deployment(http);
  deployment.client->cancel("rank 2 has died");
  const auto [code, text] =
      error_of([&] { deployment.client->start_weight_update({}, long_deadline()); });
  BOOST_TEST((code == Errc::peer_lost));
  BOOST_TEST(text.ends_with("was cancelled: rank 2 has died"), text);
  BOOST_TEST(deployment.handler->calls().empty());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
