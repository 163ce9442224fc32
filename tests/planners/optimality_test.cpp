// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// How near the planners come to the bounds on random instances whose ports are all alike: sources
/// and destinations apart, in one island, or each rank in an island of its own behind one NIC.

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <memory>

#include "core/api/builtin.hpp"
#include "core/plan/certificate.hpp"
#include "core/plan/simulate.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/support/random_problem.hpp"

namespace m2n {
namespace {

constexpr Index kMiB = 1 << 20;

/// Blocks of whole MiB, each on a random set of sources and needed by a random set of destinations.
/// The busiest port carries several hundred MiB, so that a pipeline of 1 MiB chunks can fill.
Problem random_instance(testing::Dice& dice, Rank& ranks) {
  const Rank sources = static_cast<Rank>(dice.between(1, 6));
  const Rank destinations = static_cast<Rank>(dice.between(1, 6));
  ranks = sources + destinations;
  std::vector<Rank> source_ranks;
  std::vector<Rank> destination_ranks;
  for (Rank rank = 0; rank < ranks; ++rank) {
    (rank < sources ? source_ranks : destination_ranks).push_back(rank);
  }
  const auto some = [&](const std::vector<Rank>& from) {
    std::vector<Rank> chosen;
    const std::uint64_t percent = 20 + 20 * dice.below(5);
    for (const Rank rank : from) {
      if (dice.chance(percent)) {
        chosen.push_back(rank);
      }
    }
    if (chosen.empty()) {
      chosen.push_back(from[dice.below(from.size())]);
    }
    return chosen;
  };
  const Index blocks = dice.between(2, 12);
  std::vector<Parameter> parameters;
  for (Index b = 0; b < blocks; ++b) {
    const Shape shape{dice.between(30, 180), kMiB};
    const Box whole = Box::whole(shape);
    std::vector<RankPiece> held;
    for (const Rank rank : some(source_ranks)) {
      held.push_back({rank, {whole, {0, 0, row_major(shape)}}});
    }
    std::vector<RankPiece> needed;
    for (const Rank rank : some(destination_ranks)) {
      needed.push_back({rank, {whole, {0, 0, row_major(shape)}}});
    }
    Parameter parameter;
    parameter.name = "block" + std::to_string(b);
    parameter.shape = shape;
    parameter.source = {std::make_shared<Layout>(Layout::explicit_pieces(
                            shape, DType::u8, source_ranks, std::move(held))),
                        {parameter.name}};
    parameter.destination = {std::make_shared<Layout>(Layout::explicit_pieces(
                                 shape, DType::u8, destination_ranks, std::move(needed))),
                             {parameter.name}};
    parameters.push_back(std::move(parameter));
  }
  return Problem::make(std::move(parameters));
}

Topology equal_ports(Rank ranks, bool apart) {
  Topology topology = Topology::single_island(ranks, apart ? 380 : 48, 0);
  if (apart) {
    topology.islands.clear();
    for (Rank rank = 0; rank < ranks; ++rank) {
      topology.islands.push_back({rank});
      topology.nics.push_back({{rank}, 48, 48});
    }
  }
  return topology;
}

BOOST_AUTO_TEST_SUITE(planners)
BOOST_AUTO_TEST_SUITE(optimality)

BOOST_AUTO_TEST_CASE(equal_ports_let_balanced_and_relay_meet_their_bounds) {
  const Registries registries = builtin_registries();
  const auto balanced = registries.planners.create("balanced", {});
  const std::string chunk = std::to_string(kMiB);
  const auto relay = registries.planners.create("relay", {{{"chunk_bytes", chunk}}});
  const auto chains =
      registries.planners.create("relay", {{{"chunk_bytes", chunk}, {"chains", "always"}}});
  double worst_balanced = 0;
  double worst_relay = 0;
  double worst_chains = 0;
  double most_gained = 0;
  int relayed = 0;
  const int instances = static_cast<int>(testing::random_cases() / 20);
  for (int i = 0; i < instances; ++i) {
    testing::Dice dice(static_cast<std::uint64_t>(i) + 1);
    Rank ranks = 0;
    const Problem problem = random_instance(dice, ranks);
    const Topology topology = equal_ports(ranks, i % 2 == 1);
    const FlowClasses classes(problem);
    const Plan direct = balanced->plan(problem, topology);
    const Certificate certificate = certify(direct, problem, topology, classes);
    BOOST_TEST_INFO("instance " << i << '\n' << to_text(certificate));
    BOOST_TEST(certificate.direct_ratio <= 1.01);
    worst_balanced = std::max(worst_balanced, certificate.direct_ratio);

    const Plan chained = relay->plan(problem, topology);
    SimulateOptions options;
    options.discipline = SimulateOptions::Discipline::proportional;
    const double seconds = simulate(chained, problem, topology, options).seconds;
    const double bound = certificate.bounds.seconds();
    BOOST_TEST_INFO("instance " << i << ", relay " << seconds << '\n' << to_text(certificate));
    BOOST_TEST(seconds <= 1.05 * bound);
    worst_relay = std::max(worst_relay, seconds / bound);

    // Plain max-min fair ports, with four chunks under way on each.
    SimulateOptions fair;
    fair.in_flight = 4;
    const double pipelined =
        simulate(chains->plan(problem, topology), problem, topology, fair).seconds;
    BOOST_TEST_INFO("instance " << i << ", chains " << pipelined << '\n' << to_text(certificate));
    BOOST_TEST(pipelined <= 1.05 * bound);
    worst_chains = std::max(worst_chains, pipelined / bound);
    relayed += chained.stage_count > 1 ? 1 : 0;
    most_gained = std::max(most_gained, certificate.bounds.direct_seconds() / bound);
    for (const double time : {seconds, pipelined, simulate(direct, problem, topology).seconds}) {
      BOOST_TEST(time >= certificate.bounds.hard_seconds() * (1 - 1e-9));
    }
  }
  BOOST_TEST_MESSAGE("over " << instances << " instances: balanced / bound without relays at most "
                             << worst_balanced << ", simulated relay / bound at most "
                             << worst_relay << " (proportional), " << worst_chains
                             << " (max-min fair, chains always); " << relayed
                             << " gain from relays, at most by a factor of " << most_gained);
  BOOST_TEST(relayed > instances / 10);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
