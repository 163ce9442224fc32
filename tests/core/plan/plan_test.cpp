// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/plan.hpp"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <ostream>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "core/plan/atoms.hpp"
#include "core/plan/plan_builder.hpp"
#include "tests/support/placed_problem.hpp"
#include "tests/support/print.hpp"
#include "tests/support/random_cases.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

std::shared_ptr<const Layout> layout(const Shape& shape, const Dims& mesh, std::vector<Rank> ranks,
                                     std::vector<Placement> placements, DType dtype = DType::f32) {
  return std::make_shared<const Layout>(
      Layout::sharded(shape, dtype, Mesh(mesh, std::move(ranks)), placements));
}

/// [8,8] rows over 0-1 to columns over 2-3, by hand: four moves.
struct Rows2Columns {
  Problem problem;
  Pattern pattern;

  static Rows2Columns make() {
    const auto rows = layout({8, 8}, {2}, {0, 1}, {Placement::shard(0)});
    const auto columns = layout({8, 8}, {2}, {2, 3}, {Placement::shard(1)});
    Pattern pattern;
    pattern.geometry = {rows, columns};
    pattern.boxes = {{{0, 0}, {4, 4}}, {{4, 0}, {8, 4}}, {{0, 4}, {4, 8}}, {{4, 4}, {8, 8}}};
    pattern.moves = {{0, 0, 2, 0}, {1, 1, 2, 0}, {2, 0, 3, 0}, {3, 1, 3, 0}};
    return {Problem::make({{"w", {8, 8}, {rows, {"w"}}, {columns, {"w"}}, false}}), pattern};
  }

  Plan plan() const {
    PlanBuilder builder(problem, "by hand");
    builder.assign(0, builder.add(pattern));
    return std::move(builder).finish();
  }
};

/// A way to spoil a plan, and what check_plan must say.
struct Spoiled {
  std::string why;
  std::function<void(Pattern&)> spoil;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Spoiled& c) { return os << c.why; }

const std::vector<Spoiled> kSpoiled = {
    {"a missing move", [](Pattern& p) { p.moves.pop_back(); },
     "box [4:8, 4:8] on rank 3 is never written"},
    {"a move made twice", [](Pattern& p) { p.moves.push_back(p.moves[0]); },
     "on rank 2 is written more than once"},
    {"a box that leaves its sender's rows",
     [](Pattern& p) {
       p.boxes[0].hi[0] = 4;
       p.boxes[1].lo[0] = 3;
     },
     "is sent from a rank that does not hold it"},
    {"a box that is a row short", [](Pattern& p) { p.boxes[0].hi[0] = 3; },
     "box [3:4, 0:4] on rank 2 is never written"},
    {"a sender that does not hold the box", [](Pattern& p) { p.moves[0].from = 1; },
     "on rank 1 is sent from a rank that does not hold it"},
    {"a receiver of another column", [](Pattern& p) { p.moves[0].to = 3; },
     "on rank 3 is written outside of what the rank holds"},
    {"a move into a source", [](Pattern& p) { p.moves[0].to = 1; }, "does not exist"},
    {"a holding that does not exist", [](Pattern& p) { p.moves[0].from = 9; }, "does not exist"},
    {"a box that does not exist", [](Pattern& p) { p.moves[0].box = 9; }, "does not exist"},
    {"a move of nothing",
     [](Pattern& p) {
       p.boxes.push_back({{2, 2}, {2, 4}});
       p.moves.push_back({4, 0, 2, 0});
     },
     "is empty, and moves anyway"},
};

BOOST_AUTO_TEST_SUITE(plan)
BOOST_AUTO_TEST_SUITE(check)

BOOST_AUTO_TEST_CASE(a_right_plan_passes) {
  const Rows2Columns c = Rows2Columns::make();
  BOOST_CHECK_NO_THROW(check_plan(c.plan(), c.problem));
}

BOOST_DATA_TEST_CASE(a_spoiled_plan_is_named, bdata::make(kSpoiled), spoiled) {
  Rows2Columns c = Rows2Columns::make();
  Plan plan = c.plan();
  spoiled.spoil(plan.patterns[0]);
  BOOST_CHECK_EXCEPTION(check_plan(plan, c.problem), Error, [&](const Error& error) {
    BOOST_TEST_MESSAGE(error.what());
    return error.code() == Errc::bad_plan &&
           std::string(error.what()).find(spoiled.part) != std::string::npos &&
           std::string(error.what()).find("'w'") != std::string::npos;
  });
}

/// 0 holds all; 1 and 2 need all; 2 is served by 1.
BOOST_AUTO_TEST_CASE(a_relay_must_wait_for_what_it_passes_on) {
  const auto one = layout({8}, {1}, {0}, {Placement::replicate()});
  const auto two = layout({8}, {2}, {1, 2}, {Placement::replicate()});
  const Problem problem = Problem::make({{"w", {8}, {one, {"w"}}, {two, {"w"}}, false}});
  const auto plan_with = [&](std::vector<Move> moves, std::vector<Box> boxes) {
    Pattern pattern{{one, two}, std::move(boxes), std::move(moves), {}};
    PlanBuilder builder(problem, "chain");
    builder.assign(0, builder.add(std::move(pattern)));
    return std::move(builder).finish();
  };
  const std::vector<Box> halves = {{{0}, {4}}, {{4}, {8}}, {{0}, {8}}};
  BOOST_CHECK_NO_THROW(
      check_plan(plan_with({{0, 0, 1, 0}, {1, 0, 1, 1}, {2, 1, 2, 2}}, halves), problem));
  // The second half arrives in the stage in which all is passed on.
  BOOST_CHECK_THROW(
      check_plan(plan_with({{0, 0, 1, 0}, {1, 0, 1, 1}, {2, 1, 2, 1}}, halves), problem), Error);
}

BOOST_AUTO_TEST_CASE(scratch_that_is_still_in_use_is_not_given_away) {
  const auto one = layout({8}, {1}, {0}, {Placement::replicate()});
  const auto two = layout({8}, {1}, {1}, {Placement::replicate()});
  const Problem problem = Problem::make({{"a", {8}, {one, {"a"}}, {two, {"a"}}, false},
                                         {"b", {8}, {one, {"b"}}, {two, {"b"}}, false}});
  const auto plan_from = [&](std::uint32_t stage_of_b) {
    Pattern pattern{{one, two}, {{{0}, {8}}}, {{0, 0, 2, 0}, {0, 2, 1, 1}}, {{2, {{0}, {8}}, 0}}};
    PlanBuilder builder(problem, "via scratch");
    const std::uint32_t number = builder.add(std::move(pattern));
    builder.assign(0, number, 0);
    builder.assign(1, number, stage_of_b);
    return std::move(builder).finish();
  };
  BOOST_CHECK_NO_THROW(check_plan(plan_from(2), problem));
  BOOST_CHECK_THROW(check_plan(plan_from(1), problem), Error);
  BOOST_TEST(make_program(plan_from(2), problem, 2).scratch_bytes == 32U);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(atoms)

/// Who owns element k? Each element lies in exactly one atom a needed box, with exactly its holders
/// and receivers.
BOOST_AUTO_TEST_CASE(random_atoms_know_every_holder_and_receiver) {
  const std::uint64_t seed = testing::test_seed();
  for (std::uint64_t i = 0; i < 400; ++i) {
    std::mt19937_64 random(seed + i);
    const auto placed = testing::placed_problem(random);
    for (const Parameter& parameter : placed.problem.parameters()) {
      const Geometry geometry{parameter.source.layout, parameter.destination.layout};
      const Atoms list(geometry);
      const Index elements = element_count(parameter.shape);
      for (Index flat = 0; flat < elements; ++flat) {
        const Box element = boxes_of_flat_range(parameter.shape, {flat, flat + 1}).front();
        std::vector<std::uint32_t> holders;
        std::vector<std::uint32_t> receivers;
        for (std::uint32_t h = 0; h < geometry.source_count(); ++h) {
          if (geometry.source->pieces()[h].piece.box.contains(element)) {
            holders.push_back(h);
          }
        }
        for (std::uint32_t h = 0; h < geometry.destination_count(); ++h) {
          if (geometry.destination->pieces()[h].piece.box.contains(element)) {
            receivers.push_back(geometry.source_count() + h);
          }
        }
        std::size_t found = 0;
        for (std::size_t a = 0; a < list.size(); ++a) {
          if (list[a].box.contains(element)) {
            ++found;
            BOOST_TEST_REQUIRE((std::vector<std::uint32_t>(list[a].holders.begin(),
                                                           list[a].holders.end()) == holders));
            BOOST_TEST_REQUIRE((std::vector<std::uint32_t>(list[a].receivers.begin(),
                                                           list[a].receivers.end()) == receivers));
          }
        }
        BOOST_TEST_REQUIRE(found == (receivers.empty() ? 0U : 1U));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(overlapping_sources_are_cut_where_the_holders_change) {
  const auto source = std::make_shared<const Layout>(Layout::explicit_pieces(
      {10}, DType::f32, {}, {{0, {{{0}, {6}}, {0, 0, {1}}}}, {1, {{{4}, {10}}, {0, 0, {1}}}}}));
  const auto whole = layout({10}, {1}, {2}, {Placement::replicate()});
  const Atoms list({source, whole});
  BOOST_TEST_REQUIRE(list.size() == 3U);
  BOOST_TEST(list[0].holders.size() == 1U);
  BOOST_TEST(list[1].box == (Box{{4}, {6}}));
  BOOST_TEST(list[1].holders.size() == 2U);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(program)

BOOST_AUTO_TEST_CASE(a_column_cut_is_described_by_strides) {  // A42
  const auto whole = layout({4, 8}, {1}, {0}, {Placement::replicate()}, DType::bf16);
  const auto columns = layout({4, 8}, {2}, {1, 2}, {Placement::shard(1)}, DType::bf16);
  const Problem problem = Problem::make({{"w", {4, 8}, {whole, {"w"}}, {columns, {"w"}}, false}});
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(3));
  const Program program = make_program(plan, problem, 2);
  BOOST_TEST_REQUIRE(program.receives.size() == 1U);
  const Region& region = program.receives[0];
  BOOST_TEST(region.from.offset_bytes == 8U);  // element 4 of row 0; rows start at 4, 12, 20, 28
  BOOST_TEST(region.copy.extents == (Dims{4, 4}));
  BOOST_TEST(region.copy.source_strides == (Strides{8, 1}));
  BOOST_TEST(region.copy.destination_strides == (Strides{4, 1}));
  BOOST_TEST(region.bytes == 32U);
}

BOOST_AUTO_TEST_CASE(replicas_offer_but_each_byte_is_written_once) {  // A45
  // Four data-parallel copies of (8,4) to three engines of TP 2.
  const auto copies = layout({8, 4}, {4}, {0, 1, 2, 3}, {Placement::replicate()});
  const auto engines =
      layout({8, 4}, {3, 2}, {4, 5, 6, 7, 8, 9}, {Placement::replicate(), Placement::shard(0)});
  const Problem problem = Problem::make({{"w", {8, 4}, {copies, {"w"}}, {engines, {"w"}}, false}});
  const Registries registries = builtin_registries();
  for (const char* name : {"direct", "balanced"}) {
    const Plan plan =
        registries.planners.create(name, {})->plan(problem, Topology::single_island(10));
    check_plan(plan, problem);
    const PlanSummary summary = summarize(plan, problem);
    BOOST_TEST(summary.bytes == 3U * 8U * 4U * 4U);
    for (std::size_t rank = 4; rank < 10; ++rank) {
      BOOST_TEST(summary.ingress_bytes[rank] == 4U * 4U * 4U);
    }
    if (std::string(name) == "direct") {
      BOOST_TEST(summary.regions == 6U);  // two an engine
    } else {
      BOOST_TEST(summary.max_egress_bytes() == 3U * 8U * 4U * 4U / 4U);  // spread over the copies
    }
  }
}

BOOST_AUTO_TEST_CASE(a_transposed_source_is_decided_by_its_strides_not_its_shape) {  // A38, A40
  // A square router stored transposed, to rows over two workers.
  const auto stored = std::make_shared<const Layout>(
      Layout::explicit_pieces({4, 4}, DType::f32, {}, {{0, {{{0, 0}, {4, 4}}, {0, 0, {1, 4}}}}}));
  const auto rows = layout({4, 4}, {2}, {1, 2}, {Placement::shard(0)});
  const Problem problem = Problem::make({{"w", {4, 4}, {stored, {"w"}}, {rows, {"w"}}, false}});
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(3));
  const Program program = make_program(plan, problem, 2);
  BOOST_TEST_REQUIRE(program.receives.size() == 1U);
  const Region& region = program.receives[0];
  BOOST_TEST(region.from.offset_bytes == 8U);  // row 2 is column 2 of what is stored
  BOOST_TEST(region.copy.extents == (Dims{2, 4}));
  BOOST_TEST(region.copy.source_strides == (Strides{1, 4}));
  BOOST_TEST(region.copy.destination_strides == (Strides{4, 1}));
}

BOOST_AUTO_TEST_CASE(neighbours_on_both_sides_become_one_region) {
  // Two experts, one after the other in a fused buffer on either side.
  const auto at = [](Rank rank, std::uint64_t offset) {
    return std::make_shared<const Layout>(Layout::explicit_pieces(
        {4, 4}, DType::bf16, {}, {{rank, {{{0, 0}, {4, 4}}, {0, offset, {4, 1}}}}}));
  };
  const Problem problem =
      Problem::make({{"e0", {4, 4}, {at(0, 0), {"all"}}, {at(1, 0), {"w13"}}, false},
                     {"e1", {4, 4}, {at(0, 32), {"all"}}, {at(1, 32), {"w13"}}, false}});
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(2));
  for (const Rank rank : {0, 1}) {
    const Program program = make_program(plan, problem, rank);
    const auto& regions = rank == 0 ? program.sends : program.receives;
    BOOST_TEST((program.problem == &problem));
    BOOST_TEST(program.parameters == (std::vector<std::uint32_t>{0, 1}));
    BOOST_TEST_REQUIRE(regions.size() == 1U);
    BOOST_TEST(regions[0].bytes == 64U);
    BOOST_TEST(regions[0].copy.extents == (Dims{32}));
  }
}

/// Both ends of a pair list the same regions in the same order; the whole is the plan's summary.
BOOST_AUTO_TEST_CASE(random_programs_agree_pair_by_pair_and_add_up) {
  const std::uint64_t seed = testing::test_seed();
  const Registries registries = builtin_registries();
  for (std::uint64_t i = 0; i < 300; ++i) {
    std::mt19937_64 random(seed + i);
    const auto placed = testing::placed_problem(random);
    const Problem& problem = placed.problem;
    const Topology topology = Topology::single_island(8);
    for (const auto& entry : registries.planners.entries()) {
      const auto planner = registries.planners.create(entry.first, {});
      const Plan plan = planner->plan(problem, topology);
      const PlanSummary summary = summarize(plan, problem);
      std::vector<Program> programs;
      std::uint64_t received = 0;
      std::uint64_t copied = 0;
      for (Rank rank = 0; rank < problem.world_size(); ++rank) {
        programs.push_back(make_program(plan, problem, rank));
        const Plan own = planner->plan_for(problem, topology, rank);
        BOOST_TEST_REQUIRE(own.digest == plan.digest);
        const Program alone = make_program(own, problem, rank);
        BOOST_TEST_REQUIRE(alone.sends.size() == programs.back().sends.size());
        BOOST_TEST_REQUIRE(alone.receives.size() == programs.back().receives.size());
        BOOST_TEST_REQUIRE(alone.copies.size() == programs.back().copies.size());
        for (const Region& region : programs.back().receives) {
          received += region.bytes;
        }
        for (const Region& region : programs.back().copies) {
          copied += region.bytes;
        }
      }
      BOOST_TEST_REQUIRE(received == summary.bytes);
      BOOST_TEST_REQUIRE(copied == summary.local_bytes);
      for (const Program& from : programs) {
        for (const Program& to : programs) {
          std::vector<const Region*> sent;
          std::vector<const Region*> got;
          for (const Region& region : from.sends) {
            if (region.to.rank == to.rank) {
              sent.push_back(&region);
            }
          }
          for (const Region& region : to.receives) {
            if (region.from.rank == from.rank) {
              got.push_back(&region);
            }
          }
          BOOST_TEST_REQUIRE(sent.size() == got.size());
          for (std::size_t r = 0; r < sent.size(); ++r) {
            BOOST_TEST_REQUIRE(sent[r]->bytes == got[r]->bytes);
            BOOST_TEST_REQUIRE(sent[r]->stage == got[r]->stage);
            BOOST_TEST_REQUIRE(sent[r]->from.offset_bytes == got[r]->from.offset_bytes);
            BOOST_TEST_REQUIRE(sent[r]->to.offset_bytes == got[r]->to.offset_bytes);
          }
        }
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(digest)

BOOST_AUTO_TEST_CASE(equal_geometries_are_planned_once) {
  const auto rows = layout({8, 8}, {2}, {0, 1}, {Placement::shard(0)});
  const auto again = layout({8, 8}, {2}, {0, 1}, {Placement::shard(0)});  // equal, not shared
  const auto columns = layout({8, 8}, {2}, {2, 3}, {Placement::shard(1)});
  const Problem problem = Problem::make({{"a", {8, 8}, {rows, {"a"}}, {columns, {"a"}}, false},
                                         {"b", {8, 8}, {again, {"b"}}, {columns, {"b"}}, false}});
  BOOST_TEST(group_by_geometry(problem).size() == 1U);
}

BOOST_AUTO_TEST_CASE(digests_differ_with_names_moves_and_layouts) {
  const Rows2Columns c = Rows2Columns::make();
  const std::string digest = c.plan().digest;
  BOOST_TEST(digest == Rows2Columns::make().plan().digest);
  Rows2Columns other = Rows2Columns::make();
  std::swap(other.pattern.moves[0], other.pattern.moves[1]);
  BOOST_TEST(digest != other.plan().digest);
  const Problem renamed = Problem::make({{"v",
                                          {8, 8},
                                          {c.pattern.geometry.source, {"w"}},
                                          {c.pattern.geometry.destination, {"w"}},
                                          false}});
  PlanBuilder builder(renamed, "by hand");
  builder.assign(0, builder.add(c.pattern));
  BOOST_TEST(digest != std::move(builder).finish().digest);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
