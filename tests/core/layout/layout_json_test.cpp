// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Canonical JSON, there and back.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <numeric>
#include <ostream>
#include <random>

#include "core/error.hpp"
#include "core/layout/layout.hpp"
#include "tests/support/random_problem.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

void there_and_back(const Layout& layout) {
  const std::string json = layout.canonical_json();
  const Layout back = Layout::from_json(json, "layout");
  BOOST_REQUIRE_MESSAGE(back == layout, json << " came back as " << back.canonical_json());
  BOOST_REQUIRE(back.canonical_json() == json);
  BOOST_REQUIRE(back.covers_by_design() == layout.covers_by_design());
  for (const Rank rank : layout.ranks()) {
    BOOST_REQUIRE(back.compact(rank).local_shape == layout.compact(rank).local_shape);
    BOOST_REQUIRE(back.compact(rank).pieces == layout.compact(rank).pieces);
  }
}

struct Refused {
  const char* why;
  const char* json;
  const char* part;  ///< Of the error.
};
std::ostream& operator<<(std::ostream& os, const Refused& c) { return os << c.why; }

/// A flat [4, 3] over two ranks, with one thing wrong.
#define FLAT(first, second) \
  R"({"dtype":"f32","flat":true,"pieces":{"0":[)" first R"(],"1":[)" second R"(]},"shape":[4,3]})"
#define ROWS(lo, hi, offset)                                     \
  "{\"box\":[[" #lo "," #hi "],[0,3]],\"offset_bytes\":" #offset \
  ",\"slot\":0,"                                                 \
  "\"strides\":[3,1]}"

const std::vector<Refused> kRefused = {
    {"no JSON", "{", "layout is not JSON"},
    {"no shape", R"({"dtype":"f32","pieces":{}})", "'shape'"},
    {"an unknown dtype", R"({"dtype":"f33","pieces":{},"shape":[]})", "f33"},
    {"an unknown key", R"({"dtype":"f32","pieces":{},"shape":[],"x":1})", "unknown key 'x'"},
    {"a negative extent", R"({"dtype":"f32","pieces":{},"shape":[-1]})", "negative extent"},
    {"a rank that is none", R"({"dtype":"f32","pieces":{"-1":[]},"shape":[1]})", "keys are ranks"},
    {"a box outside",
     R"({"dtype":"f32","pieces":{"0":[{"box":[[0,5]],"offset_bytes":0,"slot":0,"strides":[1]}]},)"
     R"("shape":[4]})",
     "leaves the tensor"},
    {"a placement too many",
     R"j({"dtype":"f32","mesh":{"dims":[2],"start":0},"placements":["Shard(0)","Replicate"],)j"
     R"("shape":[4]})",
     "one an axis"},
    {"flat with a hole", FLAT(ROWS(0, 2, 0), ROWS(3, 4, 0)), "every element once"},
    {"flat and held twice", FLAT(ROWS(0, 2, 0), ROWS(1, 4, 0)), "every element once"},
    {"flat without an end", FLAT(ROWS(0, 2, 0), ROWS(2, 3, 0)), "every element once"},
    {"flat with a jump in the buffer", FLAT(ROWS(0, 1, 0) "," ROWS(1, 2, 24), ROWS(2, 4, 0)),
     "rank 0 are no contiguous part"},
    {"flat in another order", FLAT(ROWS(1, 2, 0) "," ROWS(0, 1, 12), ROWS(2, 4, 0)),
     "rank 0 are no contiguous part"},
    {"flat with strides of its own",
     FLAT(R"({"box":[[0,2],[0,3]],"offset_bytes":0,"slot":0,"strides":[1,2]})", ROWS(2, 4, 0)),
     "rank 0 are no contiguous part"},
    {"flat in a second slot",
     FLAT(ROWS(0, 2, 0), R"({"box":[[2,4],[0,3]],"offset_bytes":0,"slot":1,"strides":[3,1]})"),
     "rank 1 are no contiguous part"},
};

BOOST_AUTO_TEST_SUITE(layout)
BOOST_AUTO_TEST_SUITE(json)

BOOST_AUTO_TEST_CASE(random_layouts_come_back_equal) {
  const std::uint64_t seed = std::random_device{}();
  BOOST_TEST_MESSAGE("seed " << seed);
  testing::Dice dice(seed);
  for (int i = 0; i < 1000; ++i) {
    const Problem problem = testing::random_problem(dice);
    for (const Parameter& parameter : problem.parameters()) {
      BOOST_TEST_CONTEXT("seed " << seed) {
        there_and_back(*parameter.source.layout);
        there_and_back(*parameter.destination.layout);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(random_flat_slices_come_back_equal) {
  const std::uint64_t seed = std::random_device{}();
  testing::Dice dice(seed);
  for (int i = 0; i < 1000; ++i) {
    Shape shape;
    for (Index d = dice.between(1, 3); d > 0; --d) {
      shape.push_back(dice.between(0, 5));
    }
    std::vector<Rank> ranks(static_cast<std::size_t>(dice.between(1, 5)));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::reverse(ranks.begin(),
                 ranks.begin() + static_cast<std::ptrdiff_t>(dice.below(ranks.size())));
    const Index begin = dice.between(0, 9);
    BOOST_TEST_CONTEXT("seed " << seed) {
      there_and_back(Layout::flat(shape, DType::bf16, begin,
                                  begin + element_count(shape) + dice.between(0, 9), ranks));
    }
  }
}

BOOST_AUTO_TEST_CASE(offsets_and_extents_above_two_to_the_31_come_back) {
  there_and_back(Layout::sharded({Index{1} << 33, 3}, DType::f64, Mesh({3}, 4),
                                 {Placement::strided_shard(0, 2)}));
}

BOOST_DATA_TEST_CASE(what_is_no_layout_is_refused_with_its_place, bdata::make(kRefused), c) {
  BOOST_CHECK_EXCEPTION(Layout::from_json(c.json, "layout"), Error, [&](const Error& error) {
    BOOST_TEST_MESSAGE(error.what());
    return error.code() == Errc::bad_argument &&
           std::string(error.what()).find(c.part) != std::string::npos;
  });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
