// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What NVIDIA's reshard library can be told, its settings and its log: no CUDA here.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <numeric>
#include <ostream>
#include <set>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "tests/support/placed_problem.hpp"
#include "tests/support/random_cases.hpp"
#include "transports/nccl_m2n/forms.hpp"
#include "transports/nccl_m2n/log.hpp"
#include "transports/nccl_m2n/options.hpp"

namespace m2n::nccl_m2n {
namespace {

namespace bdata = boost::unit_test::data;

using Placements = std::vector<Placement>;

std::shared_ptr<const Layout> layout(const Shape& shape, const Dims& mesh, std::vector<Rank> ranks,
                                     const Placements& placements, DType dtype = DType::bf16) {
  return std::make_shared<const Layout>(
      Layout::sharded(shape, dtype, Mesh(mesh, std::move(ranks)), placements));
}

std::vector<Rank> ranks(Rank first, Rank count) {
  std::vector<Rank> out(static_cast<std::size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

std::shared_ptr<const Layout> sharded(const Shape& shape, int dim, Rank first, Rank count) {
  return layout(shape, {count}, ranks(first, count), {Placement::shard(dim)});
}
std::shared_ptr<const Layout> replicated(const Shape& shape, Rank first, Rank count,
                                         DType dtype = DType::bf16) {
  return layout(shape, {count}, ranks(first, count), {Placement::replicate()}, dtype);
}

Problem problem_of(const Shape& shape, std::shared_ptr<const Layout> source,
                   std::shared_ptr<const Layout> destination, bool cast = false) {
  return Problem::make(
      {{"w", shape, {std::move(source), {"w"}}, {std::move(destination), {"w"}}, cast}});
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

struct Refused {
  const char* why;
  std::function<Problem()> problem;
  const char* part;  // of the sentence
};
std::ostream& operator<<(std::ostream& os, const Refused& c) { return os << c.why; }

const std::vector<Refused> kRefused = {
    {"a cast",
     [] { return problem_of({8}, replicated({8}, 0, 1), replicated({8}, 1, 1, DType::f32), true); },
     "source is bf16 and its destination f32"},
    {"no elements",
     [] {
       return problem_of({0, 4}, replicated({0, 4}, 0, 1), replicated({0, 4}, 1, 1));
     },
     "has no elements"},
    {"four dimensions",
     [] {
       const Shape shape = {2, 2, 2, 2};
       return problem_of(shape, replicated(shape, 0, 1), replicated(shape, 1, 1));
     },
     "has 4 dimensions"},
    {"an uneven shard",
     [] {
       return problem_of({5, 4}, sharded({5, 4}, 0, 0, 2), replicated({5, 4}, 2, 1));
     },
     "source is sharded unevenly"},
    {"a rank without a part",
     [] {
       return problem_of({2, 4}, replicated({2, 4}, 0, 1), sharded({2, 4}, 0, 1, 3));
     },
     "rank 3 of its destination holds nothing of it"},
    {"two sharded dimensions",
     [] {
       return problem_of(
           {4, 4}, layout({4, 4}, {2, 2}, ranks(0, 4), {Placement::shard(0), Placement::shard(1)}),
           replicated({4, 4}, 4, 1));
     },
     "source is sharded along dimensions 0 and 1"},
    {"ranks on both sides",
     [] { return problem_of({4}, sharded({4}, 0, 0, 2), replicated({4}, 1, 2)); },
     "rank 1 is on both sides"},
    {"a gap between ranks",
     [] {
       return problem_of({4}, layout({4}, {2}, {0, 2}, {Placement::shard(0)}),
                         replicated({4}, 3, 1));
     },
     "ranks of its source are not contiguous"},
    {"shards in another order than ranks",
     [] {
       return problem_of({4}, layout({4}, {2}, {1, 0}, {Placement::shard(0)}),
                         replicated({4}, 2, 1));
     },
     "do not follow one another"},
    {"strided shards in several pieces",
     [] {
       return problem_of({8}, layout({8}, {2}, ranks(0, 2), {Placement::strided_shard(0, 2)}),
                         replicated({8}, 2, 1));
     },
     "holds 2 pieces of it"},
    {"a view into a fused buffer",
     [] {
       const auto view = std::make_shared<const Layout>(Layout::explicit_pieces(
           {4, 4}, DType::bf16, {}, {{1, {{{0, 0}, {4, 4}}, {0, 0, {8, 1}}}}}));
       return problem_of({4, 4}, replicated({4, 4}, 0, 1), view);
     },
     "strided view of a larger or transposed buffer"},
    {"too many sources",
     [] {
       return problem_of({40, 2}, sharded({40, 2}, 0, 0, 40), replicated({40, 2}, 40, 1));
     },
     "comes from 40 source shards"},
    {"too many targets",
     [] { return problem_of({4}, replicated({4}, 0, 1), replicated({4}, 1, 65)); },
     "sends to 65 ranks"},
    {"larger than the staging",
     [] {
       const Shape shape = {(Index{2} << 30) / 2 + 1};
       return problem_of(shape, replicated(shape, 0, 1), replicated(shape, 1, 1));
     },
     "option staging=BYTES:SLOTS"},
};

/// What local parts say of an element, by the library's words alone.
bool covers_what_the_layout_says(const SideForm& form, const Layout& layout) {
  for (const RankPiece& piece : layout.pieces()) {
    if (!form.holds(piece.rank)) {
      return false;
    }
    const Box& box = piece.piece.box;
    for (std::size_t d = 0; d < layout.shape().size(); ++d) {
      const Index part = static_cast<Index>(form.local_shape[d]);
      const bool cut = form.shards > 1 && form.shard_dim == static_cast<int>(d);
      const Index lo = cut ? form.shard_of(piece.rank) * part : 0;
      if (box.lo[d] != lo || box.hi[d] != lo + part) {
        return false;
      }
    }
  }
  return static_cast<std::size_t>(form.count()) == layout.ranks().size();
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_m2n_forms)

BOOST_DATA_TEST_CASE(what_the_library_cannot_express_is_refused_by_name, bdata::make(kRefused), c) {
  const std::string text = refusal([&] { express(c.problem(), 0, {}); });
  BOOST_TEST(text.find("transport 'nccl_m2n' cannot move parameter 'w': ") != std::string::npos,
             text);
  BOOST_TEST(text.find(c.part) != std::string::npos, text);
  BOOST_TEST(text.find(", expected ") != std::string::npos, text);
}

BOOST_AUTO_TEST_CASE(meshes_of_shards_and_replicas_keep_their_order) {
  const Shape shape = {8, 6};
  const Problem problem = problem_of(
      shape, layout(shape, {2, 2}, ranks(0, 4), {Placement::replicate(), Placement::shard(0)}),
      layout(shape, {3, 2}, ranks(4, 6), {Placement::shard(1), Placement::replicate()}));
  const Form form = express(problem, 0, {});
  BOOST_TEST((form.source.dims == std::vector<int>{2, 2}));
  BOOST_TEST((form.source.placements == std::vector<int>{kReplicate, 0}));
  BOOST_TEST((form.source.local_shape == std::vector<std::size_t>{4, 6}));
  BOOST_TEST((form.destination.dims == std::vector<int>{3, 2}));
  BOOST_TEST((form.destination.placements == std::vector<int>{1, kReplicate}));
  BOOST_TEST((form.destination.local_shape == std::vector<std::size_t>{8, 2}));
  BOOST_TEST(form.destination.start == 4);
  BOOST_TEST(form.source.rank_of(1, 0) == 1);
  BOOST_TEST(form.destination.rank_of(1, 0) == 6);
}

BOOST_AUTO_TEST_CASE(two_axes_on_one_dimension_and_scalars_are_in_reach) {
  const Shape shape = {8, 6};
  const Form two = express(
      problem_of(shape,
                 layout(shape, {2, 2}, ranks(0, 4), {Placement::shard(0), Placement::shard(0)}),
                 replicated(shape, 4, 1)),
      0, {});
  BOOST_TEST((two.source.dims == std::vector<int>{4}));
  BOOST_TEST((two.source.placements == std::vector<int>{0}));
  const Form scalar = express(problem_of({}, replicated({}, 0, 1), replicated({}, 1, 1)), 0, {});
  BOOST_TEST((scalar.source.local_shape == std::vector<std::size_t>{1}));
}

BOOST_AUTO_TEST_CASE(random_layouts_are_refused_or_told_as_they_are) {
  const std::uint64_t seed = testing::test_seed();
  std::uint64_t told = 0;
  // The library can express few of them, so not a few are tried where cases are saved, too.
  for (std::uint64_t i = 0; i < std::max<std::uint64_t>(1000, testing::random_cases() / 10); ++i) {
    std::mt19937_64 random(seed + i);
    const auto placed = testing::placed_problem(random);
    for (std::uint32_t p = 0; p < placed.problem.parameters().size(); ++p) {
      const Parameter& parameter = placed.problem.parameters()[p];
      Form form;
      try {
        form = express(placed.problem, p, {});
      } catch (const Error&) {
        continue;
      }
      ++told;
      BOOST_TEST_REQUIRE(covers_what_the_layout_says(form.source, *parameter.source.layout));
      BOOST_TEST_REQUIRE(
          covers_what_the_layout_says(form.destination, *parameter.destination.layout));
      std::map<std::pair<Rank, Rank>, std::uint64_t> traffic;
      add_traffic(form, traffic);
      std::map<Rank, std::uint64_t> arrived;
      for (const auto& [pair, bytes] : traffic) {
        arrived[pair.second] += bytes;
      }
      for (const Rank rank : parameter.destination.layout->ranks()) {
        const Box& box = parameter.destination.layout->pieces_of(rank).front().piece.box;
        BOOST_TEST_REQUIRE(arrived[rank] == static_cast<std::uint64_t>(box.volume()) *
                                                bytes_of(parameter.destination_dtype()));
      }
    }
  }
  BOOST_TEST(told > 0U);
}

BOOST_AUTO_TEST_CASE(traffic_is_that_of_planner_m2n_uniform) {
  const Shape shape = {24, 4};
  for (const auto& [sources, targets] : {std::pair{1, 3}, {2, 3}, {3, 2}, {2, 4}, {4, 1}}) {
    const Rank first = sources * 2;
    const Problem problem = problem_of(
        shape,
        layout(shape, {sources, 2}, ranks(0, first), {Placement::replicate(), Placement::shard(0)}),
        layout(shape, {targets, 3}, ranks(first, targets * 3),
               {Placement::replicate(), Placement::shard(0)}));
    std::map<std::pair<Rank, Rank>, std::uint64_t> told;
    add_traffic(express(problem, 0, {}), told);
    const Plan plan = builtin_registries()
                          .planners.create("m2n_uniform", {})
                          ->plan(problem, Topology::single_island(problem.world_size()));
    std::map<std::pair<Rank, Rank>, std::uint64_t> planned;
    for (Rank rank = 0; rank < problem.world_size(); ++rank) {
      for (const Region& region : make_program(plan, problem, rank).sends) {
        planned[{region.from.rank, region.to.rank}] += region.bytes;
      }
    }
    BOOST_TEST((told == planned), sources << " to " << targets << " replicas");
  }
}

BOOST_AUTO_TEST_CASE(a_miniature_has_the_pattern_of_the_whole) {
  const Shape shape = {64, 4096};
  const Form form =
      express(problem_of(shape, sharded(shape, 0, 0, 2), sharded(shape, 1, 2, 4)), 0, {});
  const Form small = form.miniature();
  BOOST_TEST(small.pattern() == form.pattern());
  BOOST_TEST((small.source.local_shape == std::vector<std::size_t>{1, 256}));
  BOOST_TEST((small.destination.local_shape == std::vector<std::size_t>{2, 64}));
}

BOOST_AUTO_TEST_CASE(caps_follow_the_path) {
  const auto caps = [](const Options& options, bool one_host) {
    return M2nOptions::parse(options).caps(one_host);
  };
  BOOST_TEST(caps({}, true).sources == 32);
  BOOST_TEST(caps({}, false).sources == 16);
  BOOST_TEST(caps({{"grouped", "on"}}, true).sources == 16);
  BOOST_TEST(caps({{"path", "direct"}}, false).sources == 32);
  BOOST_TEST(caps({{"staging", "1024:2,4096:1"}}, true).staging_bytes == 4096U);
}

BOOST_AUTO_TEST_CASE(settings_become_the_librarys_variables) {
  const auto set = M2nOptions::parse({{"path", "pipe"},
                                      {"internal_streams", "off"},
                                      {"staging", "1048576:4"},
                                      {"pipe_network", "host_rma"},
                                      {"balance", "node_aware"}})
                       .variables();
  BOOST_TEST(set.at("NCCL_RESHARD_COPY_ALGORITHM") == "PIPE");
  BOOST_TEST(set.at("NCCL_RESHARD_USE_INTERNAL_STREAMS") == "off");
  BOOST_TEST(set.at("NCCL_RESHARD_PACK_BUFFSIZES") == "1048576:4");
  BOOST_TEST(set.at("NCCL_RESHARD_PIPE_NET_MODE") == "HOST_RMA");
  BOOST_TEST(set.at("NCCL_RESHARD_LB_MODE") == "NODE_AWARE");
  BOOST_TEST(!set.contains("NCCL_RESHARD_CHUNK_SIZE"));
}

BOOST_AUTO_TEST_CASE(bad_settings_are_refused_with_what_would_be_right) {
  const std::vector<std::pair<Options, std::string>> cases = {
      {{{"path", "fast"}}, "pack or direct or pipe"},
      {{{"grouped", "yes"}}, "on or off"},
      {{{"staging", "12"}}, "BYTES:SLOTS"},
      {{{"staging", "12:0"}}, "BYTES:SLOTS"},
      {{{"staging", "12:1,"}}, "BYTES:SLOTS"},
      {{{"ctas", "0"}}, "a whole number from 1"},
      {{{"speed", "9"}}, "speed"},
  };
  for (const auto& [options, part] : cases) {
    const std::string text = refusal([&options = options] { M2nOptions::parse(options); });
    BOOST_TEST(text.find(part) != std::string::npos, text);
  }
}

BOOST_AUTO_TEST_CASE(the_path_is_read_from_the_lines_of_this_rank) {
  const std::string log =
      "[RESHARD][DEBUG][Rank 0] pack-lsa-hput: ranks=2 srcShards=1 dstShards=1 areaBytes=256\n"
      "a line of somebody else\n"
      "[RESHARD][DEBUG][Rank 0] reshardCopyPack: isSource=1 isDest=0\n"
      "[RESHARD][DEBUG][Rank 1] pack-lsa-hput: NCCL 2.30.5 predates ordered host-RMA\n"
      "[RESHARD][DEBUG][Rank 1] reshardCopyPack: isSource=0 isDest=1\n"
      "[RESHARD][DEBUG][Rank 10] ncclReshard: copy_algo=1 num_ctas=8\n"
      "[RESHARD][DEBUG][Rank 3] ncclM2nGroupEnd: count=2 numTargets=1\n";
  BOOST_TEST(path_in_log(log, 0, "pack") == "pack-lsa-hput");
  BOOST_TEST(path_in_log(log, 1, "pack") == "pack-kernel");
  BOOST_TEST(path_in_log(log, 10, "pipe") == "pipe-kernel");
  BOOST_TEST(path_in_log(log, 3, "pack") == "grouped-kernel");
  BOOST_TEST(path_in_log(log, 2, "pack") == "not logged");
  BOOST_TEST(lines_of_others(log) == "a line of somebody else\n");
  BOOST_TEST(lines_of_others("half a line") == "half a line");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl_m2n
