// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/flow.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <numeric>
#include <random>

namespace m2n {
namespace {

/// max over sets X of ports: bytes that only X may carry / rate of X. Exponential.
double hall_bound(const std::vector<FlowDemand>& demands, const std::vector<double>& rates) {
  double worst = 0;
  for (unsigned set = 1; set < (1U << rates.size()); ++set) {
    double rate = 0;
    for (std::size_t p = 0; p < rates.size(); ++p) {
      rate += (set >> p & 1U) != 0 ? rates[p] : 0;
    }
    double bytes = 0;
    for (const FlowDemand& demand : demands) {
      bool inside = true;
      for (const std::uint32_t port : demand.ports) {
        inside = inside && (set >> port & 1U) != 0;
      }
      bytes += inside ? static_cast<double>(demand.bytes) : 0;
    }
    worst = std::max(worst, bytes / rate);
  }
  return worst;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), 1.0); }

BOOST_AUTO_TEST_SUITE(core_plan)
BOOST_AUTO_TEST_SUITE(flow)

BOOST_AUTO_TEST_CASE(nothing_to_carry_takes_no_time) {
  const MinMaxFlow none = min_max_flow({}, std::vector<double>{1e9});
  BOOST_TEST(none.seconds == 0);
  BOOST_TEST(none.binding_ports.empty());
}

BOOST_AUTO_TEST_CASE(a_hot_pair_of_ports_is_the_binding_set) {
  // 9 GB only on ports 0 and 1; 1 GB anywhere. All four together would need 2.5 s.
  const std::vector<FlowDemand> demands = {{9'000'000'000, {0, 1}}, {1'000'000'000, {0, 1, 2, 3}}};
  const MinMaxFlow best = min_max_flow(demands, std::vector<double>(4, 1e9));
  BOOST_TEST(near(best.seconds, 4.5));
  BOOST_TEST(best.binding_ports == (std::vector<std::uint32_t>{0, 1}),
             boost::test_tools::per_element());
  BOOST_TEST(near(best.bytes[0][0], 4.5e9));
  BOOST_TEST(near(best.bytes[1][2] + best.bytes[1][3], 1e9));
}

BOOST_AUTO_TEST_CASE(equal_ports_share_evenly_where_an_optimum_allows) {
  const std::vector<FlowDemand> demands(5, FlowDemand{400, {0, 1, 2, 3}});
  const MinMaxFlow best = min_max_flow(demands, std::vector<double>(4, 1e6));
  for (const auto& shares : best.bytes) {
    for (const double share : shares) {
      BOOST_TEST(near(share, 100));
    }
  }
}

BOOST_AUTO_TEST_CASE(unequal_rates_get_unequal_shares) {
  const MinMaxFlow best =
      min_max_flow(std::vector<FlowDemand>{{4000, {0, 1}}}, std::vector<double>{1e6, 3e6});
  BOOST_TEST(near(best.seconds, 1e-3));
  BOOST_TEST(near(best.bytes[0][1], 3000));
}

BOOST_AUTO_TEST_CASE(random_instances_meet_the_worst_hall_set_and_no_port_is_late) {
  std::mt19937 random(20261129);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  for (int round = 0; round < 3000; ++round) {
    const std::uint32_t ports = 1 + below(7);
    std::vector<double> rates;
    for (std::uint32_t p = 0; p < ports; ++p) {
      rates.push_back(1e6 * (1 + below(4)));
    }
    std::vector<FlowDemand> demands(1 + below(9));
    for (FlowDemand& demand : demands) {
      demand.bytes = below(4) == 0 ? 0 : std::uint64_t{below(1000)} << below(30);
      const std::uint32_t count = 1 + below(3);
      for (std::uint32_t i = 0; i < count; ++i) {
        demand.ports.push_back(below(ports));  // repeats on purpose
      }
    }
    const MinMaxFlow best = min_max_flow(demands, rates);
    const double expected = hall_bound(demands, rates);
    BOOST_TEST_INFO("round " << round);
    BOOST_TEST(near(best.seconds, expected));
    std::vector<double> load(ports, 0);
    for (std::size_t d = 0; d < demands.size(); ++d) {
      BOOST_TEST(near(std::accumulate(best.bytes[d].begin(), best.bytes[d].end(), 0.0),
                      static_cast<double>(demands[d].bytes)));
      for (std::size_t i = 0; i < demands[d].ports.size(); ++i) {
        BOOST_TEST(best.bytes[d][i] >= 0);
        load[demands[d].ports[i]] += best.bytes[d][i];
      }
    }
    double binding_rate = 0;
    for (const std::uint32_t port : best.binding_ports) {
      binding_rate += rates[port];
    }
    if (expected > 0) {
      BOOST_TEST(near(best.binding_bytes / binding_rate, expected));
    }
    for (std::uint32_t p = 0; p < ports; ++p) {
      BOOST_TEST(load[p] / rates[p] <= expected * (1 + 1e-9));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
