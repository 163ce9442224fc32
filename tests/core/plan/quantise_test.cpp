// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/quantise.hpp"

#include <boost/test/unit_test.hpp>
#include <set>
#include <string>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "core/plan/relabel.hpp"

namespace m2n {
namespace {

/// @p text with @p from, which it has once, replaced.
std::string with(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  BOOST_REQUIRE_MESSAGE(at != std::string::npos, "no '" << from << "'");
  return text.replace(at, from.size(), to);
}

/// Two trainers with the rows of a weight, two workers with its columns.
const std::string kProblem = R"json({"parameters": [
  {"name": "w", "dtype": "bf16", "shape": [10, 9],
   "source": {"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"],
              "dtype": "bf16"},
   "destination": {"mesh": {"dims": [2], "start": 2}, "placements": ["Shard(1)"],
                   "dtype": "f8_e4m3", "quantise": {"blocks": [5, 4], "scales": "s"}}},
  {"name": "s", "dtype": "f32", "shape": [2, 3],
   "destination": {"mesh": {"dims": [2], "start": 2}, "placements": ["Replicate"]}}]})json";

/// The sentence that refuses @p text, or "accepted".
std::string refusal(const std::string& text) {
  try {
    Problem::parse(text, "t.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

Plan direct(const Problem& problem) {
  return builtin_registries()
      .planners.create("direct", {})
      ->plan(problem, Topology::single_island(problem.world_size()));
}

}  // namespace

BOOST_AUTO_TEST_SUITE(quantise)

BOOST_AUTO_TEST_CASE(scales_lie_at_the_source_as_the_weights_do) {
  const Problem problem = Problem::parse(kProblem, "t.json");
  BOOST_TEST(problem.scales_of(0).value() == 1U);
  BOOST_TEST(!problem.scales_of(1));
  const Layout& scales = *problem.parameters()[1].source.layout;
  BOOST_REQUIRE(scales.pieces().size() == 2U);
  for (const auto& [rank, piece] : scales.pieces()) {
    BOOST_TEST((piece.box == Box{{rank, 0}, {rank + 1, 3}}), to_string(piece.box));
    BOOST_TEST(piece.view.offset_bytes == 0U);
  }
  // A block is cut by the workers: columns 0 to 5 are a block and a part of one, 5 to 9 the rest.
  const Program program = make_program(direct(problem), problem, 0);
  std::multiset<std::string> seen;
  for (const Region& region : program.sends) {
    if (region.copy.quantises()) {
      BOOST_TEST((region.scales.role == Role::source && region.scales.rank == 0));
      BOOST_TEST(problem.buffers(Role::source).names[region.scales.buffer] == "s");
      seen.insert(to_string(region.copy.extents) + " from " +
                  std::to_string(region.from.offset_bytes) + " to " +
                  std::to_string(region.to.rank) + " at " + std::to_string(region.to.offset_bytes) +
                  " scale " + std::to_string(region.scales.offset_bytes / sizeof(float)));
    }
  }
  const std::multiset<std::string> expected{
      "[5, 4] from 0 to 2 at 0 scale 0", "[5] from 8 to 2 at 4 scale 1",
      "[5, 3] from 10 to 3 at 0 scale 1", "[5] from 16 to 3 at 3 scale 2"};
  BOOST_TEST(seen == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(digests_tell_how_elements_are_quantised) {
  const auto digest = [](const std::string& text) {
    return direct(Problem::parse(text, "t.json")).digest;
  };
  BOOST_TEST(digest(kProblem) == digest(kProblem));
  // Blocks of 5 x 3 have as many scales, in a layout of the same form.
  BOOST_TEST(digest(kProblem) != digest(with(kProblem, "[5, 4]", "[5, 3]")));
  // The blocks of 1-D weights may be left out from the front.
  BOOST_TEST(refusal(with(with(kProblem, "[5, 4]", "[4]"), "[2, 3]", "[10, 3]")) == "accepted");
}

BOOST_AUTO_TEST_CASE(relabelling_keeps_what_is_said_of_scales) {
  const Problem problem = Problem::parse(kProblem, "t.json");
  const Problem other = relabelled(problem, {{3, 2}, {}, {}});
  BOOST_REQUIRE(other.parameters()[0].quantise.has_value());
  BOOST_TEST((other.parameters()[0].quantise->blocks == Dims{5, 4}));
  BOOST_TEST(other.scales_of(0).value() == 1U);
}

BOOST_AUTO_TEST_CASE(what_does_not_fit_is_refused_in_words) {
  // The same, with the scales' source stated.
  const std::string stated = with(kProblem, R"("shape": [2, 3],)", R"json("shape": [2, 3],
   "source": {"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"]},)json");
  BOOST_TEST(refusal(stated) == "accepted");
  const auto check = [&](const std::string& from, const std::string& to, const std::string& words) {
    const std::string said = refusal(with(stated, from, to));
    BOOST_TEST(said.find(words) != std::string::npos, said << " (expected '" << words << "')");
  };
  check("[5, 4]", "[4, 4]",
        "parameter 'w': 's', which holds its scales, has shape [2, 3]; blocks [4, 4] of shape "
        "[10, 9] have [3, 3]");
  BOOST_TEST(refusal(with(kProblem, "[5, 4]", "[4, 4]")).find("have [3, 3]") != std::string::npos);
  check("[5, 4]", "[5, 4, 2]", "has 3 extents for a tensor of 2 dimensions");
  check("[5, 4]", "[0, 4]", "has an extent below 1");
  check(R"("scales": "s")", R"("scales": "t")", "its scales are 't', which is no other parameter");
  check(R"("scales": "s")", R"("scales": "w")", "its scales are 'w', which is no other parameter");
  check(R"(, "quantise": {"blocks": [5, 4], "scales": "s"})", "",
        "nothing says how to quantise it");
  check(R"(, "quantise": {"blocks": [5, 4], "scales": "s"})", R"(, "cast": true)",
        "nothing says how to quantise it");
  check(R"("dtype": "f8_e4m3")", R"("dtype": "f8_e5m2")",
        "the source has dtype bf16 and the destination f8_e5m2; quantising makes f8_e4m3 of");
  check(R"("dtype": "f8_e4m3")", R"("dtype": "bf16")", "quantising makes f8_e4m3 of");
  check(R"("name": "s", "dtype": "f32")", R"("name": "s", "dtype": "bf16")",
        "has dtype bf16 on one side; scales are f32 on both");
  check(R"("dims": [2], "start": 0)", R"("dims": [3], "start": 0)",
        "box [0:4, 0:9] on source rank 0 begins or ends inside a block of [5, 4]; a source that "
        "quantises holds whole blocks");
  const std::string placed = "[2, 3],\n   \"source\": {\"mesh\": {\"dims\": [2], \"start\": 0}, ";
  check(placed + R"json("placements": ["Shard(0)"])json",
        placed + R"json("placements": ["Shard(1)"])json",
        "has its scales in box [0:1, 0:3] of 's', and the rank has no piece with all of that");
  check(placed + R"json("placements": ["Shard(0)"])json",
        placed + R"json("placements": ["Replicate"])json",
        "of its scales, 's', on source rank 0 is of blocks that the rank does not hold");
  check(R"("parameters": [)", R"json("parameters": [
  {"name": "v", "dtype": "bf16", "shape": [10, 9],
   "source": {"mesh": {"dims": [2], "start": 0}, "placements": ["Shard(0)"]},
   "destination": {"mesh": {"dims": [2], "start": 2}, "placements": ["Shard(1)"],
                   "dtype": "f8_e4m3", "quantise": {"blocks": [5, 4], "scales": "s"}}},)json",
        "its scales, 's', are already those of 'v'");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
