// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/certificate.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>

#include "core/api/builtin.hpp"
#include "core/plan/relabel.hpp"
#include "core/plan/simulate.hpp"
#include "core/plan/traffic.hpp"
#include "tests/support/catalogues.hpp"

namespace m2n {
namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(a, b); }

Plan plan_with(const std::string& planner, const Problem& problem, const Topology& topology,
               const Options& options = {}) {
  return builtin_registries().planners.create(planner, {options})->plan(problem, topology);
}

/// 8 MB on ranks 0 and 1, needed whole by ranks 2 to 5.
Problem replicas() {
  return Problem::parse(R"json({"parameters":[{"name":"w","dtype":"u8","shape":[8000000],
      "source":{"mesh":{"dims":[2],"start":0},"placements":["Replicate"]},
      "destination":{"mesh":{"dims":[4],"start":2},"placements":["Replicate"]}}]})json",
                        "t.json");
}

BOOST_AUTO_TEST_SUITE(core_plan)
BOOST_AUTO_TEST_SUITE(certificate)

BOOST_AUTO_TEST_CASE(figures_follow_by_hand_and_name_what_binds) {
  Topology topology = Topology::single_island(6, 8, 0);
  topology.link_nominal_gb_per_s = 10;
  const Problem problem = replicas();
  const Certificate direct = certify(plan_with("direct", problem, topology), problem, topology);
  BOOST_TEST(near(direct.seconds, 4e-3));  // rank 0 sends four times 8 MB at 8 GB/s
  BOOST_TEST(direct.binds == "rank 0 egress");
  BOOST_TEST(near(direct.bounds.seconds(), 1e-3));  // 8 MB into one rank
  BOOST_TEST(near(direct.bounds.hard_seconds(), 0.8e-3));
  BOOST_TEST(direct.bounds.best().name == "B1 rank ingress");
  BOOST_TEST(near(direct.bounds.direct_seconds(), 2e-3));  // two sources, 32 MB
  BOOST_TEST(direct.bounds.best_direct().binds == "sources {0, 1} hold 100.0 % of the bytes");
  BOOST_TEST(near(direct.ratio, 4));
  BOOST_TEST(near(direct.direct_ratio, 2));
  const Certificate balanced = certify(plan_with("balanced", problem, topology), problem, topology);
  BOOST_TEST(near(balanced.seconds, 2e-3));
  const Certificate relay = certify(plan_with("relay", problem, topology), problem, topology);
  BOOST_TEST(near(relay.seconds, 1e-3));
  BOOST_TEST(relay.hops == 4U);
  BOOST_TEST(to_text(relay).find("plan / bound 1.0000") != std::string::npos);
  BOOST_TEST(to_json(relay).find("\"bound_name\":\"B1 rank ingress\"") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(nothing_that_moves_has_ratio_one) {
  const Problem problem = Problem::parse(R"json({"parameters":[{"name":"w","dtype":"u8","shape":[8],
      "source":{"mesh":{"dims":[1],"start":0},"placements":["Replicate"]},
      "destination":{"mesh":{"dims":[1],"start":0},"placements":["Replicate"]}}]})json",
                                         "t.json");
  const Topology topology = Topology::single_island(1);
  const Certificate c = certify(plan_with("balanced", problem, topology), problem, topology);
  BOOST_TEST(c.seconds == 0);
  BOOST_TEST(c.ratio == 1);
  BOOST_TEST(c.summary.local_bytes == 8U);
  BOOST_TEST(c.binds == "nothing moves");
}

BOOST_AUTO_TEST_CASE(an_uplink_binds_when_it_is_the_narrowest_cut) {
  const Topology topology = Topology::parse(
      R"({"islands":[{"ranks":[0,1]},{"ranks":[2,3,4,5]}],"link_gb_per_s":100,
          "nics":[{"ranks":[0],"gb_per_s":10},{"ranks":[1],"gb_per_s":10},{"ranks":[2],"gb_per_s":10},
                  {"ranks":[3],"gb_per_s":10},{"ranks":[4],"gb_per_s":10},{"ranks":[5],"gb_per_s":10}],
          "uplinks":[{"name":"leaf","ranks":[0,1],"gb_per_s":4}]})",
      "t.json");
  const Bounds bounds = bounds_of(FlowClasses(replicas()), topology);
  BOOST_TEST(bounds.best().name == "B5 uplink");
  BOOST_TEST(bounds.best().binds == "uplink 'leaf' egress");
  BOOST_TEST(near(bounds.seconds(), 2e-3));
}

BOOST_AUTO_TEST_CASE(traffic_and_stages_add_up_to_the_summary) {
  const Problem problem = replicas();
  const Topology topology = Topology::single_island(6, 8, 0);
  const Plan plan = plan_with("broadcast", problem, topology, {{"chunk_bytes", "1000000"}});
  const PlanSummary summary = summarize(plan, problem);
  const TrafficMatrix traffic = traffic_matrix(plan, problem);
  BOOST_TEST(traffic.sum() == summary.bytes + summary.local_bytes);
  BOOST_TEST(summary.scratch_bytes == 2'000'000U);
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::uint64_t staging = 0;
    for (const StageUsage& usage : usage_of(plan, problem, rank)) {
      sent += usage.sent_bytes;
      received += usage.received_bytes;
      staging = std::max(staging, usage.scratch_bytes);
    }
    BOOST_TEST(sent == summary.egress_bytes[static_cast<std::size_t>(rank)]);
    BOOST_TEST(received == summary.ingress_bytes[static_cast<std::size_t>(rank)]);
    BOOST_TEST(staging <= summary.scratch_bytes);
    BOOST_TEST((staging > 0) == (rank != 1));  // rank 1 holds it, too, but takes no part
  }
}

BOOST_AUTO_TEST_CASE(a_circle_of_messages_is_an_error_and_not_a_hang) {
  const Topology topology = Topology::single_island(2);
  BOOST_CHECK_EXCEPTION((void)simulate({{0, 1, 0, 8, {1}}, {1, 0, 0, 8, {0}}}, topology), Error,
                        [](const Error& error) { return error.code() == Errc::bad_plan; });
}

BOOST_AUTO_TEST_CASE(simulated_ports_share_max_min_fairly) {
  // Rank 0 sends 10 MB to 1 and to 2 at 10 GB/s; rank 3 sends 5 MB to 2, which takes 10 GB/s in.
  const Topology topology = Topology::single_island(4, 10, 0);
  const Timeline t = simulate(
      {{0, 1, 0, 10'000'000, {}}, {0, 2, 0, 10'000'000, {}}, {3, 2, 0, 5'000'000, {}}}, topology);
  BOOST_TEST(near(t.events[2].end, 1e-3));  // half of rank 2's port
  BOOST_TEST(near(t.seconds, 2e-3));
  BOOST_TEST(near(t.ports.front().busy, 2e-3));
}

BOOST_AUTO_TEST_CASE(relabelling_keeps_bytes_where_they_are) {
  // Ranks 0 to 3 hold and need quarters, but each needs the quarter of the rank across.
  const Problem problem = Problem::parse(R"json({"parameters":[{"name":"w","dtype":"u8","shape":[8],
      "source":{"mesh":{"dims":[4],"ranks":[0,1,2,3]},"placements":["Shard(0)"]},
      "destination":{"mesh":{"dims":[4],"ranks":[2,3,0,1]},"placements":["Shard(0)"]}}]})json",
                                         "t.json");
  const Topology topology = Topology::parse(
      R"({"islands":[{"ranks":[0,1]},{"ranks":[2,3]}],"link_gb_per_s":100,
          "nics":[{"ranks":[0,1],"gb_per_s":10},{"ranks":[2,3],"gb_per_s":10}]})",
      "t.json");
  const Relabelling r = relabel(problem, topology);
  BOOST_TEST(r.before.far == 8U);
  BOOST_TEST(r.after.local == 8U);
  const Problem better = relabelled(problem, r);
  BOOST_TEST(summarize(plan_with("direct", better, topology), better).bytes == 0U);
  // Where it cannot help it claims nothing.
  const Relabelling none = relabel(replicas(), Topology::single_island(6));
  BOOST_TEST(none.ranks == (std::vector<Rank>{2, 3, 4, 5}), boost::test_tools::per_element());
  BOOST_TEST(none.after.island == none.before.island);
}

BOOST_AUTO_TEST_CASE(checkpoint_lists_have_the_published_counts_and_bytes) {
  const auto totals = [](const Catalogue& catalogue) {
    std::uint64_t bytes = 0;
    for (const TensorInfo& tensor : catalogue) {
      bytes += static_cast<std::uint64_t>(element_count(tensor.shape)) * bytes_of(tensor.dtype);
    }
    return std::pair(catalogue.size(), bytes);
  };
  BOOST_TEST((totals(testing::deepseek_v3()) ==
              std::pair(std::size_t{91'991}, std::uint64_t{688'574'839'360})));
  BOOST_TEST((totals(testing::kimi_k2()) ==
              std::pair(std::size_t{139'644}, std::uint64_t{1'029'173'256'720})));
  BOOST_TEST((totals(testing::qwen3_235b()) ==
              std::pair(std::size_t{36'945}, std::uint64_t{470'187'269'120})));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
