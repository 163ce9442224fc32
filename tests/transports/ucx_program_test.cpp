// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// One experiment over loopback and over ucx: the same plan, the same bytes; and a job of real
/// processes, round after round.

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>

#include "tests/cli/support.hpp"

namespace m2n {
namespace {

namespace json = boost::json;
using testing::Outcome;

/// Four trainers to two workers: rows to columns, rows to replicas, columns to rows.
constexpr const char* kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "bf16", "shape": [640, 384],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]
}
, "destination" : { "mesh" : {"dims" : [2], "start" : 4}, "placements" : ["Shard(1)"] }
},
  {"name": "v", "dtype": "f32", "shape": [1003],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Replicate"]}},
  {"name": "c", "dtype": "f16", "shape": [333, 77],
   "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(1)"]},
   "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Shard(0)"]}}]})json";

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(ucx_program)

BOOST_AUTO_TEST_CASE(dumps_of_loopback_and_ucx_differ_in_the_transport_alone) {
  const testing::TemporaryFolder folder;
  folder.write("p.json", kProblem);
  for (const std::string transport : {"loopback", "ucx"}) {
    const Outcome outcome =
        testing::m2n(folder, {"run", "--problem", "p.json", "--transport", transport, "--rounds",
                              "2", "--dump", transport + ".h5"});
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
  }
  const Outcome outcome = testing::m2n(folder, {"diff", "loopback.h5", "ucx.h5"});
  BOOST_TEST(outcome.status == 1, outcome.err);
  BOOST_TEST(outcome.out.find("'loopback' and 'ucx'") != std::string::npos, outcome.out);
  BOOST_TEST(outcome.out.find("\n1 differences in") != std::string::npos, outcome.out);
}

/// Each worker compares every element with the oracle's in every round, and all digests agree.
BOOST_AUTO_TEST_CASE(ten_rounds_of_six_processes_bring_the_same_weights_over_both) {
  const testing::TemporaryFolder folder;
  folder.write("p.json", kProblem);
  std::vector<json::object> found;
  for (const std::string transport : {"loopback", "ucx"}) {
    const Outcome outcome =
        testing::m2n(folder, {"launch", "--problem", "p.json", "--transport", transport, "--rounds",
                              "10", "--json", "--log", "off"});
    BOOST_TEST_REQUIRE(outcome.status == 0, outcome.err);
    found.push_back(json::parse(outcome.out).as_object());
    BOOST_TEST(found.back().at("version").as_int64() == 10);
    BOOST_TEST(found.back().at("digest_verified").as_bool());
    BOOST_TEST(found.back().at("verified_elements").as_int64() ==
               10 * (640 * 384 + 2 * 1003 + 333 * 77));
  }
  BOOST_TEST(found[0].at("plan_digest").as_string() == found[1].at("plan_digest").as_string());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
