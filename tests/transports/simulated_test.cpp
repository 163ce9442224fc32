// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The simulated transport: every rank reports the round's simulated time, and memory stays as it
/// is.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <map>
#include <mutex>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/plan/simulate.hpp"
#include "core/rendezvous/thread_group.hpp"

namespace m2n {
namespace {

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(simulated)

BOOST_AUTO_TEST_CASE(every_rank_reports_the_time_of_the_plan, *boost::unit_test::timeout(60)) {
  const Problem problem = Problem::parse(R"json({"parameters":[{"name":"w","dtype":"u8",
      "shape":[8000000],
      "source":{"mesh":{"dims":[2],"start":0},"placements":["Replicate"]},
      "destination":{"mesh":{"dims":[4],"start":2},"placements":["Replicate"]}}]})json",
                                         "t.json");
  const Registries registries = builtin_registries();
  for (const char* planner : {"direct", "balanced", "broadcast"}) {
    const Plan plan = registries.planners.create(planner, {})
                          ->plan(problem, Topology::single_island(problem.world_size()));
    const double expected =
        simulate(plan, problem, Topology::single_island(problem.world_size())).seconds;
    auto groups = make_thread_groups(problem.world_size());
    std::vector<RoundReport> reports(groups.size());
    std::vector<std::string> failures(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < groups.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          const auto transport = registries.transports.create("simulated", {});
          const Deadline deadline = deadline_in(std::chrono::seconds(30));
          transport->connect(*groups[r], deadline);
          const auto session = transport->prepare(make_program(plan, problem, static_cast<Rank>(r)),
                                                  Buffers{}, deadline);
          session->start(1, deadline);
          reports[r] = session->wait(deadline);
        } catch (const std::exception& error) {
          failures[r] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    double last = 0;
    for (std::size_t r = 0; r < groups.size(); ++r) {
      BOOST_TEST(failures[r] == "");
      BOOST_TEST(std::abs(reports[r].seconds - expected) <= 1e-12,
                 planner << " rank " << r << ": " << reports[r].seconds << " s");
      BOOST_TEST(reports[r].seconds > 0);
      for (const PeerTraffic& peer : reports[r].peers) {
        last = std::max(last, peer.end_seconds);
        BOOST_TEST((0 <= peer.start_seconds && peer.start_seconds < peer.end_seconds));
        // Both ends saw the same.
        const auto& others = reports[static_cast<std::size_t>(peer.peer)].peers;
        BOOST_TEST(std::count_if(others.begin(), others.end(), [&](const PeerTraffic& other) {
                     return other.peer == static_cast<Rank>(r) &&
                            other.start_seconds == peer.start_seconds &&
                            other.end_seconds == peer.end_seconds;
                   }) == 1);
      }
    }
    BOOST_TEST(std::abs(last - expected) <= 1e-12, planner << ": the last byte at " << last);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
