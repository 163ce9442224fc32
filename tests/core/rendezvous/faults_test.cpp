// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Jobs that are built or used wrongly, and what is left to use afterwards.

#include <boost/test/unit_test.hpp>
#include <set>

#include "core/error.hpp"
#include "tests/core/rendezvous/child_processes.hpp"
#include "tests/core/rendezvous/store_world.hpp"

namespace m2n {
namespace {

using std::chrono::milliseconds;
using testing::kToken;
using testing::long_deadline;
using testing::open_descriptors;
using testing::run_threads;

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(rendezvous_faults)

/// Ranks 0 and 1 are trainers that feed two deployments (ranks 2 and 3) in a world each.
std::vector<std::string> feed_two_deployments(const StoreServer& store, std::uint64_t epoch,
                                              bool one_order, Deadline deadline) {
  return run_threads(4, [&](Rank rank) {
    std::vector<std::string> worlds = {"deployment 0", "deployment 1"};
    if (rank >= 2) {
      worlds = {worlds[static_cast<std::size_t>(rank - 2)]};
    } else if (rank == 1 && !one_order) {
      std::swap(worlds[0], worlds[1]);
    }
    std::vector<std::unique_ptr<WorldGroup>> groups;
    for (const std::string& world : worlds) {
      WorldOptions options;
      options.port = store.port();
      options.token = kToken;
      options.epoch = epoch;
      options.world = world;
      options.rank = rank >= 2 ? 2 : rank;
      options.size = 3;
      groups.push_back(join_world(options, deadline));
    }
    for (const auto& group : groups) {
      group->barrier("work", deadline);
    }
  });
}

// C02
BOOST_AUTO_TEST_CASE(worlds_joined_in_opposite_orders_end_by_the_deadline_and_leave_nothing) {
  const ListenSocket reserved = ListenSocket::reserve("127.0.0.1", 0);
  const std::size_t before = open_descriptors();
  {
    const StoreServer store(reserved.share(), {.token = kToken, .epoch = 1});
    const auto thrown = feed_two_deployments(store, 1, false, deadline_in(milliseconds(2'000)));
    // Each trainer waits in its own first world for the other one.
    for (const std::string& text : thrown) {
      BOOST_TEST((text == "phase 'rendezvous': the deadline passed; ranks missing: 0" ||
                  text == "phase 'rendezvous': the deadline passed; ranks missing: 1"),
                 text);
    }
  }
  {
    const StoreServer store(reserved.share(), {.token = kToken, .epoch = 2});
    const auto thrown = feed_two_deployments(store, 2, true, long_deadline());
    BOOST_TEST(thrown == std::vector<std::string>(4), boost::test_tools::per_element());
  }
  BOOST_TEST(open_descriptors() == before);
}

BOOST_AUTO_TEST_CASE(after_each_kind_of_failure_the_next_epoch_works) {  // C11
  const ListenSocket reserved = ListenSocket::reserve("127.0.0.1", 0);
  enum Fault { none, absent, leaves, gives_up, out_of_step, late, faults };
  std::uint64_t epoch = 0;
  for (int fault = absent; fault < faults; ++fault) {
    for (const int now : {fault, static_cast<int>(none)}) {
      ++epoch;
      const StoreServer store(reserved.share(), {.token = kToken, .epoch = epoch});
      const auto thrown = run_threads(3, [&](Rank rank) {
        WorldOptions options;
        options.port = reserved.port();
        options.token = kToken;
        options.epoch = epoch;
        options.rank = rank;
        options.size = 3;
        const bool guilty = rank == 1;
        if (guilty && now == absent) {
          throw std::runtime_error("absent");
        }
        const bool waits = now == absent || now == late;
        const Deadline deadline = waits ? deadline_in(milliseconds(2'000)) : long_deadline();
        const auto group = join_world(options, deadline);
        if (guilty && now == leaves) {
          return;
        }
        if (guilty && now == gives_up) {
          group->abort("phase 'load': no such file");
        }
        if (guilty && now == late) {
          while (group->failure().empty()) {
            std::this_thread::sleep_for(milliseconds(1));
          }
        }
        group->barrier(guilty && now == out_of_step ? "play" : "work", deadline);
      });
      const bool fails = now != none;
      BOOST_TEST(thrown[0] == thrown[2]);
      BOOST_TEST(thrown[0].empty() != fails, thrown[0]);
      BOOST_TEST((!fails || thrown[0].find('1') != std::string::npos), thrown[0]);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
