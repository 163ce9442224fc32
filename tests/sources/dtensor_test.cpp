// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>

#include "tests/sources/harness.hpp"

namespace bdata = boost::unit_test::data;
using namespace m2n;
using namespace m2n::testing;

namespace {

struct MeshCase {
  const char* why;
  Shape shape;
  Rank ranks;
  Options options;
  std::vector<std::vector<Index>> elements;  ///< Of the whole tensor, by rank, in local order.
};
std::ostream& operator<<(std::ostream& os, const MeshCase& c) { return os << c.why; }

const std::vector<MeshCase> kMeshes = {
    {"nested and uneven is not the same as flat",
     {10},
     6,
     {{"mesh", "2,3"}, {"default", "Shard(0),Shard(0)"}},
     {{0, 1}, {2, 3}, {4}, {5, 6}, {7, 8}, {9}}},
    {"one axis of 6",
     {10},
     6,
     {{"default", "Shard(0)"}},
     {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {}}},
    {"a strided shard after a shard",
     {8},
     4,
     {{"mesh", "2,2"}, {"default", "Shard(0), StridedShard(0,2)"}},
     {{0, 2}, {1, 3}, {4, 6}, {5, 7}}},
    {"an uneven strided shard: the union over tensor parallel ranks of the real shards",
     {5},
     2,
     {{"default", "StridedShard(0,2)"}},
     {{0, 1, 3}, {2, 4}}},
    {"strided, then plain: FSDP2 over tensor parallelism",
     {8},
     4,
     {{"mesh", "2,2"}, {"default", "StridedShard(0,2),Shard(0)"}},
     {{0, 1}, {4, 5}, {2, 3}, {6, 7}}},
    {"a tiny extent sharded twice",
     {2},
     8,
     {{"mesh", "2,4"}, {"default", "Shard(0),Shard(0)"}},
     {{0}, {}, {}, {}, {1}, {}, {}, {}}},
    {"a permuted list of ranks",
     {4},
     4,
     {{"ranks", "2,0,3,1"}, {"default", "Shard(0)"}},
     {{1}, {3}, {0}, {2}}},
    {"a rank outside the mesh holds nothing",
     {4},
     3,
     {{"mesh", "2"}, {"default", "Shard(0)"}},
     {{0, 1}, {2, 3}, {}}},
    {"a scalar on every rank", {}, 4, {}, {{0}, {0}, {0}, {0}}},
    {"a negative dimension", {2, 4}, 2, {{"default", "Shard(-1)"}}, {{0, 1, 4, 5}, {2, 3, 6, 7}}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(dtensor)

BOOST_DATA_TEST_CASE(placements_give_each_rank_its_elements, bdata::make(kMeshes), c) {
  Trainers trainers("dtensor", c.options, c.ranks, {{"w", DType::f64, c.shape}});
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < c.ranks; ++rank) {
    BOOST_TEST(trainers.picture(rank, "w") ==
               elements("w", c.elements[static_cast<std::size_t>(rank)]));
  }
}

BOOST_AUTO_TEST_CASE(rank_17_of_a_2_3_4_mesh_is_1_1_1) {
  Trainers trainers("dtensor", {{"mesh", "2,3,4"}, {"default", "Shard(0),Shard(1),Shard(2)"}}, 24,
                    {{"w", DType::f32, {2, 3, 4}}});
  BOOST_TEST(trainers.held(17, "w") == (std::vector<Index>{12 + 4 + 1}));
  BOOST_TEST(breach(trainers) == "");
}

BOOST_AUTO_TEST_CASE(two_dimensions_are_cut_by_two_axes) {
  Trainers trainers("dtensor", {{"mesh", "2,4"}, {"default", "Shard(0),Shard(1)"}}, 8,
                    {{"w", DType::f32, {6, 8}}});
  for (Rank rank = 0; rank < 8; ++rank) {
    BOOST_TEST(trainers.rows(rank, "w", 0) == range(3 * (rank / 4), 3 * (rank / 4) + 3));
    BOOST_TEST(trainers.rows(rank, "w", 1) == range(2 * (rank % 4), 2 * (rank % 4) + 2));
  }
}

BOOST_AUTO_TEST_CASE(random_placements_equal_index_lists_applied_left_to_right) {
  std::mt19937_64 random(4711);
  const auto draw = [&](Index least, Index most) {
    return least + static_cast<Index>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  for (int round = 0; round < 400; ++round) {
    Shape shape;
    for (Index d = draw(0, 4); d > 0; --d) {
      shape.push_back(draw(0, 7));
    }
    Dims mesh;
    std::string mesh_text;
    std::string placements;
    struct Axis {
      int dim = -1;
      Index factor = 1;
    };
    std::vector<Axis> axes;
    for (Index m = draw(1, 3); m > 0; --m) {
      mesh.push_back(draw(1, 3));
      mesh_text += (mesh_text.empty() ? "" : ",") + std::to_string(mesh[mesh.size() - 1]);
      Axis axis;
      std::string word = "Replicate";
      if (!shape.empty() && draw(0, 3) > 0) {
        axis.dim = static_cast<int>(draw(0, static_cast<Index>(shape.size()) - 1));
        word = "Shard(" + std::to_string(axis.dim) + ")";
        if (draw(0, 2) == 0) {
          axis.factor = draw(1, 3);
          word =
              "StridedShard(" + std::to_string(axis.dim) + "," + std::to_string(axis.factor) + ")";
        }
      }
      placements += (placements.empty() ? "" : ",") + word;
      axes.push_back(axis);
    }
    const Index count = element_count(mesh);
    std::vector<Index> ranks = range(0, count);
    std::shuffle(ranks.begin(), ranks.end(), random);
    std::string rank_text;
    for (const Index rank : ranks) {
      rank_text += (rank_text.empty() ? "" : ",") + std::to_string(rank);
    }
    Trainers trainers(
        "dtensor", {{"mesh", mesh_text}, {"ranks", rank_text}, {"rule.w*", placements}},
        static_cast<Rank>(count), {{"w", DType::f64, shape}, {"w2", DType::f64, shape}});
    BOOST_TEST_INFO("mesh " << mesh_text << " ranks " << rank_text << " " << placements << " on "
                            << to_string(shape));
    BOOST_TEST(breach(trainers) == "");
    for_each_index(mesh, [&](const Dims& at, Index position) {
      std::vector<std::vector<Index>> lists;
      for (const Index extent : shape) {
        lists.push_back(range(0, extent));
      }
      for (std::size_t m = 0; m < axes.size(); ++m) {
        if (axes[m].dim < 0) {
          continue;
        }
        auto& list = lists[static_cast<std::size_t>(axes[m].dim)];
        std::vector<Index> selected;
        for (Index j = 0; j < axes[m].factor; ++j) {
          const auto part = chunk_list(chunk_list(list, axes[m].factor, j), mesh[m], at[m]);
          selected.insert(selected.end(), part.begin(), part.end());
        }
        list = selected;
      }
      Shape local;
      for (const auto& list : lists) {
        local.push_back(static_cast<Index>(list.size()));
      }
      std::vector<Index> expected;
      for_each_index(local, [&](const Dims& inside, Index) {
        Index flat = 0;
        for (std::size_t d = 0; d < shape.size(); ++d) {
          flat = flat * shape[d] + lists[d][static_cast<std::size_t>(inside[d])];
        }
        expected.push_back(flat);
      });
      const auto rank = static_cast<Rank>(ranks[static_cast<std::size_t>(position)]);
      BOOST_TEST(trainers.picture(rank, "w") == elements("w", expected));
    });
  }
}

BOOST_AUTO_TEST_CASE(the_longest_pattern_decides) {
  Trainers trainers("dtensor",
                    {{"rule.*", "Shard(0)"},
                     {"rule.a.*", "Shard(1)"},
                     {"rule.a.?.bias", "Replicate"},
                     {"rule.own", "Shard(0),Shard(0);mesh=1,2;ranks=1,0"}},
                    2,
                    {{"b", DType::f32, {2, 2}},
                     {"a.0", DType::f32, {2, 2}},
                     {"a.0.bias", DType::f32, {2}},
                     {"own", DType::f32, {2}}});
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST(trainers.held(1, "b") == (std::vector<Index>{2, 3}));
  BOOST_TEST(trainers.held(1, "a.0") == (std::vector<Index>{1, 3}));
  BOOST_TEST(trainers.held(1, "a.0.bias") == (std::vector<Index>{0, 1}));
  BOOST_TEST(trainers.held(1, "own") == (std::vector<Index>{0}));
}

struct RefusalCase {
  const char* why;
  Options options;
  Errc code;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const RefusalCase& c) { return os << c.why; }

const std::vector<RefusalCase> kRefusals = {
    {"unknown key", {{"rules", "x"}}, Errc::usage, "choices are default, mesh, ranks, rule.<"},
    {"an empty pattern", {{"rule.", "Shard(0)"}}, Errc::usage, "no option 'rule.'"},
    {"a mesh of too many ranks", {{"mesh", "2,3"}}, Errc::usage, "a mesh of 6 ranks for 4"},
    {"a list of another length", {{"mesh", "2"}, {"ranks", "0,1,2"}}, Errc::usage, "mesh of 2"},
    {"an axis of extent 0", {{"mesh", "0,4"}}, Errc::usage, "at least 1"},
    {"a rank that is none", {{"mesh", "2"}, {"ranks", "0,4"}}, Errc::usage, "lists rank 4"},
    {"a rank twice", {{"mesh", "2"}, {"ranks", "1,1"}}, Errc::usage, "lists a rank twice"},
    {"too few placements", {{"mesh", "2,2"}, {"default", "Shard(0)"}}, Errc::usage, "1 placements"},
    {"a placement that is none", {{"default", "Cut(0)"}}, Errc::usage, "option 'default'"},
    {"Partial", {{"default", "Partial(sum)"}}, Errc::usage, "Partial"},
    {"a rule that matches nothing", {{"rule.v", "Shard(0)"}}, Errc::usage, "'v' of option"},
    {"two rules of one length",
     {{"rule.w*", "Shard(0)"}, {"rule.*w", "Shard(0)"}},
     Errc::usage,
     "equally long"},
    {"an unknown part", {{"rule.w", "Shard(0);grid=4"}}, Errc::usage, "no option 'grid'"},
    {"a dimension too far", {{"rule.w", "Shard(1)"}}, Errc::bad_argument, "parameter 'w'"},
    {"a shard of a scalar", {{"rule.scale", "Shard(0)"}}, Errc::bad_argument, "parameter 'scale'"},
};

BOOST_DATA_TEST_CASE(bad_requests_are_refused, bdata::make(kRefusals), c) {
  BOOST_TEST(refuses("dtensor", c.options, 4, {{"w", DType::f32, {4}}, {"scale", DType::f32, {}}},
                     c.code, c.part));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
