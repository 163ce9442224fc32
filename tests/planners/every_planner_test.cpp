// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What every registered planner must do, on random problems and clusters.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <ostream>

#include "core/api/builtin.hpp"
#include "core/plan/certificate.hpp"
#include "tests/support/random_problem.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

struct Configured {
  std::string name;
  Options options;
};
std::ostream& operator<<(std::ostream& os, const Configured& c) {
  os << c.name;
  for (const auto& [key, value] : c.options) {
    os << ' ' << key << '=' << value;
  }
  return os;
}

/// Every planner as it comes, and some with options that change its plans.
std::vector<Configured> configured_planners() {
  std::vector<Configured> planners = {
      {"relay", {{"chains", "always"}}},
      {"relay", {{"chains", "always"}, {"chunk_bytes", "24"}}},
      {"relay", {{"chains", "always"}, {"chunk_bytes", "64"}, {"islands", "apart"}}},
      {"broadcast", {{"chunk_bytes", "40"}}},
      {"alpa_greedy", {{"balance", "none"}, {"chunks", "3"}}},
      {"alpa_greedy", {{"balance", "size"}, {"chunks", "1"}}}};
  const Registries registries = builtin_registries();
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back({entry.first, {}});
  }
  return planners;
}

std::unique_ptr<Planner> make(const Configured& c) {
  return builtin_registries().planners.create(c.name, {c.options});
}

std::string describe(const Problem& problem) {
  std::string text;
  for (const Parameter& parameter : problem.parameters()) {
    text += "\n" + parameter.name + " from " + parameter.source.layout->canonical_json() + " to " +
            parameter.destination.layout->canonical_json();
  }
  return text;
}

BOOST_AUTO_TEST_SUITE(planners)
BOOST_AUTO_TEST_SUITE(every_planner)

BOOST_DATA_TEST_CASE(delivers_every_element_once_on_random_problems,
                     bdata::make(configured_planners()), configured) {
  const auto planner = make(configured);
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    testing::Dice dice(seed);
    const Problem problem = testing::random_problem(dice);
    const Topology topology = testing::random_topology(dice, problem.world_size());
    BOOST_TEST_CONTEXT("seed " << seed << describe(problem) << " on "
                               << topology.canonical_json()) {
      const Plan plan = planner->plan(problem, topology);
      BOOST_REQUIRE_NO_THROW(check_plan(plan, problem));
      BOOST_REQUIRE_EQUAL(testing::run_and_compare(plan, problem), "");
    }
  }
}

BOOST_DATA_TEST_CASE(gives_a_rank_the_same_program_with_and_without_the_whole_plan,
                     bdata::make(configured_planners()), configured) {
  const auto planner = make(configured);
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    testing::Dice dice(seed);
    const Problem problem = testing::random_problem(dice);
    const Topology topology = testing::random_topology(dice, problem.world_size());
    const Plan plan = planner->plan(problem, topology);
    for (Rank rank = 0; rank < problem.world_size(); ++rank) {
      const Plan own = planner->plan_for(problem, topology, rank);
      BOOST_TEST(own.digest == plan.digest);
      const Program whole = make_program(plan, problem, rank);
      const Program alone = make_program(own, problem, rank);
      BOOST_TEST(alone.sends.size() == whole.sends.size());
      BOOST_TEST(alone.receives.size() == whole.receives.size());
      BOOST_TEST(alone.copies.size() == whole.copies.size());
      BOOST_TEST(alone.scratch_bytes == whole.scratch_bytes);
      BOOST_TEST(alone.stage_count == whole.stage_count);
      for (const auto& pattern : own.patterns) {
        for (const Move& move : pattern.moves) {
          BOOST_TEST((pattern.rank_of(move.from) == rank || pattern.rank_of(move.to) == rank));
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(unknown_options_are_refused_by_name) {
  const Registries registries = builtin_registries();
  for (const auto& entry : registries.planners.entries()) {
    BOOST_CHECK_EXCEPTION(registries.planners.create(entry.first, {{{"colour", "red"}}}), Error,
                          [&](const Error& error) {
                            const std::string text = error.what();
                            return error.code() == Errc::usage &&
                                   text.find("colour") != std::string::npos &&
                                   text.find(entry.first) != std::string::npos;
                          });
  }
}

BOOST_DATA_TEST_CASE(never_beats_a_bound, bdata::make(configured_planners()), configured) {
  const auto planner = make(configured);
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    testing::Dice dice(seed);
    const Problem problem = testing::random_problem(dice);
    const Topology topology = testing::random_topology(dice, problem.world_size());
    const Certificate c = certify(planner->plan(problem, topology), problem, topology);
    BOOST_TEST_INFO("seed " << seed << '\n' << to_text(c));
    BOOST_TEST(c.ratio >= 1 - 1e-9);
    if (c.hops <= 1) {
      BOOST_TEST(c.direct_ratio >= 1 - 1e-9);
    }
    BOOST_TEST(c.bounds.hard_seconds() <= c.bounds.seconds() * (1 + 1e-12));
  }
}

BOOST_DATA_TEST_CASE(refuses_a_cluster_that_is_too_small, bdata::make(configured_planners()),
                     configured) {
  const auto planner = make(configured);
  const Problem problem = Problem::parse(
      R"json({"parameters":[{"name":"w","dtype":"f32","shape":[8],
          "source":{"mesh":{"dims":[4],"start":0},"placements":["Shard(0)"]},
          "destination":{"mesh":{"dims":[4],"start":4},"placements":["Replicate"]}}]})json",
      "t.json");
  BOOST_CHECK_EXCEPTION((void)certify(planner->plan(problem, Topology::single_island(8)), problem,
                                      Topology::single_island(5)),
                        Error, [](const Error& error) {
                          return std::string(error.what()).find("rank 5") != std::string::npos;
                        });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
