// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Caches of an inference engine that were computed with the weights before: a commit says that
/// they are gone only when every worker has made sure, and fails when one cannot. C14

#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/engine/worker_service.hpp"
#include "core/rendezvous/store_server.hpp"
#include "tests/support/engine_threads.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;
using testing::check_no_error;
using testing::check_same_error;
using testing::kLong;
using testing::Threads;

/// Keeps what finish answers.
class Answers final : public ControlHandler {
 public:
  explicit Answers(std::shared_ptr<ControlHandler> handler) : handler_(std::move(handler)) {}

  json::object init_weight_transfer_engine(const json::object& info, Deadline deadline) override {
    return handler_->init_weight_transfer_engine(info, deadline);
  }
  json::object start_weight_update(const json::object& round, Deadline deadline) override {
    return handler_->start_weight_update(round, deadline);
  }
  json::object update_weights(const json::object& update, Deadline deadline) override {
    return handler_->update_weights(update, deadline);
  }
  json::object finish_weight_update(const json::object& round, Deadline deadline) override {
    answers.push_back(json::serialize(handler_->finish_weight_update(round, deadline)));
    return {};
  }
  WeightState weight_state() override { return handler_->weight_state(); }

  std::vector<std::string> answers;

 private:
  std::shared_ptr<ControlHandler> handler_;
};

/// The workers of @p threads, each with its own service, as processes have it.
class Services {
 public:
  explicit Services(Threads& threads)
      : socket_(ListenSocket::reserve("127.0.0.1", 0)), store_(socket_.share(), store_options()) {
    std::vector<std::unique_ptr<WorldGroup>> groups(threads.workers.size());
    std::vector<std::thread> joins;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      joins.emplace_back([&, i] {
        WorldOptions world;
        world.port = socket_.port();
        world.epoch = 1;
        world.rank = static_cast<Rank>(i);
        world.size = static_cast<Rank>(groups.size());
        groups[i] = join_world(world, deadline_in(kLong));
      });
    }
    for (std::thread& join : joins) {
      join.join();
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      services_.push_back(
          std::make_unique<WorkerService>(*threads.workers[i], std::move(groups[i])));
    }
    for (const auto& service : services_) {
      runs_.emplace_back([&service] { service->run(); });
    }
  }
  Services(const Services&) = delete;
  Services& operator=(const Services&) = delete;
  ~Services() {
    services_.front()->stop();
    for (std::thread& run : runs_) {
      run.join();
    }
  }

  std::shared_ptr<ControlHandler> handler() const { return services_.front()->handler(); }

 private:
  static StoreOptions store_options() {
    StoreOptions options;
    options.epoch = 1;
    return options;
  }

  ListenSocket socket_;
  StoreServer store_;
  std::vector<std::unique_ptr<WorkerService>> services_;
  std::vector<std::thread> runs_;
};

const std::vector<std::string> kInvalidated(2, R"({"caches":"invalidated"})");
const std::vector<std::string> kUnsupported(2, R"({"caches":"unsupported"})");

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(caches)

/// Workers in one process and as services; with a hook on none, on one and on all of them.
BOOST_DATA_TEST_CASE(finish_says_that_caches_are_gone_when_every_worker_has_seen_to_it,
                     bdata::make({false, true}) * bdata::xrange(3), services, hooks) {
  Threads threads;
  std::mutex mutex;
  std::vector<std::vector<std::uint64_t>> invalidated(2);
  for (std::size_t i = 0; i < static_cast<std::size_t>(hooks); ++i) {
    threads.worker_options[i].invalidate_caches = [&, i](std::uint64_t version) {
      const std::lock_guard lock(mutex);
      invalidated[i].push_back(version);
      if (threads.sinks[i]->version()) {
        throw std::logic_error("the version was committed before the caches were gone");
      }
    };
  }
  threads.make();
  const auto served = services ? std::make_unique<Services>(threads) : nullptr;
  const auto answers = std::make_shared<Answers>(served ? served->handler() : threads.handlers[0]);
  threads.handlers[0] = answers;
  check_no_error(threads.init());
  check_no_error(threads.send());
  check_no_error(threads.send());
  BOOST_TEST(threads.check(2) == "");
  BOOST_TEST(answers->answers == (hooks == 2 ? kInvalidated : kUnsupported),
             boost::test_tools::per_element());
  for (std::size_t i = 0; i < 2; ++i) {
    const std::vector<std::uint64_t> expected = i < static_cast<std::size_t>(hooks)
                                                    ? std::vector<std::uint64_t>{1, 2}
                                                    : std::vector<std::uint64_t>{};
    BOOST_TEST(invalidated[i] == expected, boost::test_tools::per_element());
  }
}

/// On one worker, and on both.
BOOST_DATA_TEST_CASE(caches_that_stay_fail_the_finish_and_the_new_weights_are_not_served,
                     bdata::make({"inplace", "shadow"}) * bdata::make({1, 0}), sink, first) {
  Threads threads(2, 2, 1, sink);
  bool armed = false;
  for (std::size_t i = static_cast<std::size_t>(first); i < 2; ++i) {
    threads.worker_options[i].invalidate_caches = [&](std::uint64_t) {
      if (armed) {
        throw std::runtime_error("a request holds its blocks");
      }
    };
  }
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.send());
  armed = true;
  check_same_error(threads.send(),
                   "phase 'finish': rank 3: the caches could not be invalidated: a request holds "
                   "its blocks");
  const WeightState state = threads.handlers[0]->weight_state();
  const bool old_stays = std::string(sink) == "shadow" && first == 0;
  BOOST_TEST(state.serving == old_stays, state.reason);
  if (old_stays) {
    BOOST_TEST(state.version == 1U);
    BOOST_TEST(threads.check(1) == "");
  }
  armed = false;
  check_no_error(threads.init(2));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(threads.engine(0).next_version() - 1) == "");
  BOOST_TEST(threads.handlers[0]->weight_state().serving);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
