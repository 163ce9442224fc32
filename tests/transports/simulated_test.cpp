// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The simulated transport: every rank reports the round's simulated time, and memory stays as it
/// is.

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
    std::vector<double> seconds(groups.size(), 0);
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
          seconds[r] = session->wait(deadline).seconds;
        } catch (const std::exception& error) {
          failures[r] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (std::size_t r = 0; r < groups.size(); ++r) {
      BOOST_TEST(failures[r] == "");
      BOOST_TEST(std::abs(seconds[r] - expected) <= 1e-12,
                 planner << " rank " << r << ": " << seconds[r] << " s");
      BOOST_TEST(seconds[r] > 0);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
