// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Versions that are left out, that go back, or that ranks do not agree about, and ranks that come
/// early: none waits for what never comes.

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <future>

#include "core/error.hpp"
#include "tests/support/engine_threads.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using testing::check_no_error;
using testing::check_same_error;
using testing::kLong;
using testing::Threads;

/// What a start of @p version is refused with; empty when it is not.
std::string refusal_of_start(ControlHandler& handler, std::uint64_t version) {
  try {
    (void)handler.start_weight_update({{"version", static_cast<std::int64_t>(version)}},
                                      deadline_in(kLong));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(versions)

BOOST_AUTO_TEST_CASE(versions_may_be_left_out_and_never_go_back) {  // C05
  Threads threads;
  threads.make();
  check_no_error(threads.init(1, {}, [](TrainerInit& init) { init.first_version = 5; }));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(5) == "");

  // Trainers that have gone on without these workers, and trainers that have gone back.
  check_no_error(threads.init(2, {}, [](TrainerInit& init) { init.first_version = 9; }));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(9) == "");
  check_no_error(threads.init(3, {}, [](TrainerInit& init) { init.first_version = 2; }));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(10) == "");

  ControlHandler& handler = *threads.handlers[0];
  for (const std::uint64_t old : {std::uint64_t{1}, std::uint64_t{9}, std::uint64_t{10}}) {
    const std::string refusal = refusal_of_start(handler, old);
    BOOST_TEST(refusal.find("version " + std::to_string(old) +
                            " comes after version 10; versions only grow") != std::string::npos,
               refusal);
  }
  // A round that somebody starts and leaves holds up nobody.
  BOOST_TEST(refusal_of_start(handler, 14) == "");
  BOOST_TEST(handler.weight_state().version == 10U);
  check_no_error(threads.send());
  BOOST_TEST(threads.check(11) == "");
}

/// The workers ask for version 3 where the trainers have 2.
BOOST_AUTO_TEST_CASE(ranks_that_expect_different_versions_all_hear_of_it) {  // C05
  Threads threads;
  threads.make();
  bool skip = false;
  check_no_error(threads.init(1, [&](ControlCall call, json::object& body) {
    if (skip && (call == ControlCall::start || call == ControlCall::update)) {
      body["version"] = 3;
    }
  }));
  check_no_error(threads.send());
  skip = true;
  const std::vector<std::string> errors = threads.send();
  check_same_error(errors, "phase 'round start'");
  check_same_error(errors, "ranks 0, 1 have 'version 2 of plan");
  check_same_error(errors, "ranks 2, 3 have 'version 3 of plan");
  BOOST_TEST(threads.handlers[0]->weight_state().serving);
  BOOST_TEST(threads.check(1) == "");

  check_no_error(threads.init(2));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(2) == "");
}

BOOST_AUTO_TEST_CASE(a_trainer_that_comes_early_waits_and_not_for_ever) {  // C05
  Threads threads;
  std::promise<void> early;
  threads.trainer_options[1].on_phase = [&](std::string_view phase) {
    if (phase == phases::kRound) {
      early.set_value();
    }
  };
  threads.make();
  check_no_error(threads.init());
  check_no_error(threads.each([&](Rank trainer) {
    if (trainer == 0) {
      early.get_future().wait();
    }
    threads.engine(trainer).send_weights();
  }));
  BOOST_TEST(threads.check(1) == "");

  threads.trainer_options[1].on_phase = nullptr;
  auto& deadlines = threads.trainer_options[1].phase_deadlines;
  deadlines[std::string(phases::kRound)] = std::chrono::milliseconds(200);
  threads.make();
  check_no_error(threads.init(2));
  const std::vector<std::string> errors = threads.each([&](Rank trainer) {
    if (trainer == 1) {
      threads.engine(trainer).send_weights();
    }
  });
  BOOST_TEST(errors[1].find("phase 'round start'") != std::string::npos, errors[1]);
  BOOST_TEST(errors[1].find("ranks missing: 0") != std::string::npos, errors[1]);

  deadlines.clear();
  threads.make();
  check_no_error(threads.init(3));
  check_no_error(threads.send());
  BOOST_TEST(threads.check(1) == "");
}

/// Trainers are at version 5 when the workers are started anew.
BOOST_AUTO_TEST_CASE(workers_that_start_anew_serve_nothing_before_they_have_weights) {  // C09
  Threads threads;
  threads.make();
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
  check_no_error(threads.init(1, {}, [](TrainerInit& init) { init.first_version = 5; }));
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
  threads.faults[3] = phases::kAccept;
  check_same_error(threads.send(), "phase 'accept'");
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
  threads.faults.clear();
  check_no_error(threads.init(2, {}, [](TrainerInit& init) { init.first_version = 5; }));
  BOOST_TEST(!threads.handlers[0]->weight_state().serving);
  check_no_error(threads.send());
  BOOST_TEST(threads.handlers[0]->weight_state().serving);
  BOOST_TEST(threads.check(5) == "");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
