// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/layout/mesh.hpp"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>
#include <string>

#include "core/error.hpp"
#include "tests/support/print.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

struct PlacementCase {
  std::string text;
  std::size_t tensor_rank;
  std::string expected;  ///< Printed form, or a part of the complaint after '!'.
};
std::ostream& operator<<(std::ostream& os, const PlacementCase& c) { return os << c.text; }

const std::vector<PlacementCase> kPlacements = {
    {"Replicate", 2, "Replicate"},
    {" Replicate ", 0, "Replicate"},
    {"Shard(0)", 1, "Shard(0)"},
    {"Shard( 1 )", 2, "Shard(1)"},
    {"Shard(-1)", 3, "Shard(2)"},
    {"StridedShard(0,2)", 1, "StridedShard(0,2)"},
    {"StridedShard(-2, 4)", 2, "StridedShard(0,4)"},
    {"Partial", 1, "!pending reduction"},
    {"Partial(sum)", 1, "!unknown"},
    {"Shard(1)", 1, "!dimension 1 of a tensor of rank 1"},
    {"Shard(0)", 0, "!dimension 0 of a tensor of rank 0"},
    {"Shard(-3)", 2, "!dimension -3"},
    {"StridedShard(0,0)", 1, "!split factor below 1"},
    {"Shard(0", 1, "!unknown"},
    {"Shard()", 1, "!unknown"},
    {"Shard(0,)", 1, "!unknown"},
    {"Shard(0,1)", 2, "!unknown"},
    {"Shard(x)", 1, "!unknown"},
    {"shard(0)", 1, "!unknown"},
    {"", 1, "!unknown"},
    {"Shard(99999999999999999999)", 1, "!unknown"},
};

BOOST_AUTO_TEST_SUITE(layout)
BOOST_AUTO_TEST_SUITE(mesh)

BOOST_DATA_TEST_CASE(placements_parse_as_they_print, bdata::make(kPlacements), c) {
  if (c.expected[0] != '!') {
    BOOST_TEST(to_string(placement_from_string(c.text, c.tensor_rank)) == c.expected);
    return;
  }
  BOOST_CHECK_EXCEPTION(placement_from_string(c.text, c.tensor_rank), Error, [&](const Error& e) {
    BOOST_TEST_MESSAGE(e.what());
    return std::string(e.what()).find(c.expected.substr(1)) != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(coordinates_are_row_major_over_the_list) {
  const Mesh mesh({2, 3, 4}, 0);
  BOOST_TEST(mesh.coordinate(17) == (Dims{1, 1, 1}));  // worked example of a (2,3,4) DeviceMesh
  const Mesh permuted({2, 2}, std::vector<Rank>{7, 3, 5, 1});
  BOOST_TEST(permuted.coordinate(2) == (Dims{1, 0}));
  BOOST_TEST(permuted.ranks()[2] == 5);
  BOOST_TEST(!permuted.contiguous_start().has_value());
  BOOST_TEST(Mesh({3}, 4).contiguous_start().value() == 4);
}

BOOST_AUTO_TEST_CASE(malformed_meshes_are_refused) {
  const auto refused = [](auto make) { BOOST_CHECK_THROW(make(), Error); };
  refused([] { return Mesh(Dims{}, 0); });
  refused([] { return Mesh({2, 0}, 0); });
  refused([] { return Mesh({2}, -1); });
  refused([] { return Mesh({2}, std::vector<Rank>{0}); });
  refused([] { return Mesh({2}, std::vector<Rank>{0, 0}); });
  refused([] { return Mesh({2}, std::vector<Rank>{0, -1}); });
  refused([] { return Mesh({2}, 2147483647); });
  refused([] { return Mesh({Index{1} << 40, Index{1} << 40}, 0); });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
