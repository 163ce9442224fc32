// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What threads of one process share: made once, kept while it is used, and errors are everybody's.

#include "core/engine/agreed.hpp"

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <thread>

#include "core/engine/requests.hpp"
#include "core/error.hpp"
#include "tests/support/engine_job.hpp"

namespace m2n {
namespace {

/// How many of @p count threads that ask for a plan of @p key at once get one.
int ask(int count, const std::string& key, const std::function<AgreedPlan()>& make,
        std::vector<std::shared_ptr<const AgreedPlan>>& plans) {
  plans.assign(static_cast<std::size_t>(count), nullptr);
  std::vector<std::thread> threads;
  for (auto& plan : plans) {
    threads.emplace_back([&] {
      try {
        plan = agreed_plan(key, make);
      } catch (const Error&) {
        plan = nullptr;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return static_cast<int>(count - std::count(plans.begin(), plans.end(), nullptr));
}

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(agreed)

BOOST_AUTO_TEST_CASE(a_plan_is_made_once_while_somebody_holds_it) {
  std::atomic<int> made = 0;
  const auto make = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that the others come
    ++made;
    return AgreedPlan{};
  };
  std::vector<std::shared_ptr<const AgreedPlan>> plans;
  BOOST_TEST(ask(8, "a", make, plans) == 8);
  BOOST_TEST(made == 1);
  BOOST_TEST(std::count(plans.begin(), plans.end(), plans.front()) == 8);
  const auto other = agreed_plan("b", make);
  BOOST_TEST(made == 2);
  BOOST_TEST((other != plans.front()));
  plans.clear();
  agreed_plan("a", make);
  BOOST_TEST(made == 3);
}

BOOST_AUTO_TEST_CASE(every_rank_gets_an_error_of_its_own_and_the_next_may_do_better) {
  std::atomic<int> tried = 0;
  std::vector<std::shared_ptr<const AgreedPlan>> plans;
  const auto fail = [&]() -> AgreedPlan {
    ++tried;
    throw Error(Errc::bad_plan, "no plan");
  };
  BOOST_TEST(ask(4, "a", fail, plans) == 0);
  BOOST_TEST(tried == 4);
  BOOST_TEST(ask(
                 4, "a", [] { return AgreedPlan{}; }, plans) == 4);
}

BOOST_AUTO_TEST_CASE(equal_texts_are_read_once_and_others_apart) {
  const testing::EngineJob job(2, 2);
  const auto first = agreed_params(params_to_text(job.params()));
  const auto again = agreed_params(params_to_text(job.params()));
  BOOST_TEST((first == again));
  BOOST_TEST(first->digest == sha256_hex(first->text));
  BOOST_TEST(first->params.size() == job.params().size());
  std::vector<ParamSpec> fewer = job.params();
  fewer.pop_back();
  BOOST_TEST(agreed_params(params_to_text(fewer))->params.size() == fewer.size());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
