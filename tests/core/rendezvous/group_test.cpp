// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Groups of threads, and what every Group does by itself.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <stdexcept>

#include "tests/support/ranks.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::World;

constexpr Rank kRanks = 5;

BOOST_AUTO_TEST_SUITE(rendezvous)
BOOST_AUTO_TEST_SUITE(group)

BOOST_DATA_TEST_CASE(a_broadcast_brings_the_roots_value_to_every_rank,
                     bdata::make({World::threads, World::threads_apart}), world) {
  const auto ends = testing::run_ranks(world, kRanks, [](Group& group) {
    for (Rank root = 0; root < kRanks; ++root) {
      const auto value = [&](Rank rank) {
        return "of rank " + std::to_string(rank) + " to root " + std::to_string(root);
      };
      const std::string said = group.broadcast("a broadcast", root, value(group.rank()),
                                               deadline_in(std::chrono::seconds(60)));
      if (said != value(root)) {
        throw std::runtime_error("'" + said + "' came from root " + std::to_string(root));
      }
    }
  });
  for (const testing::RankEnd& end : ends) {
    BOOST_TEST(end.failure == "");
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
