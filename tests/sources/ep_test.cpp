// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>

#include "tests/sources/harness.hpp"

namespace bdata = boost::unit_test::data;
using namespace m2n;
using namespace m2n::testing;

namespace {

/// Experts of each EP rank, dealt one by one.
std::vector<std::vector<Index>> dealt(const std::string& assignment, Index experts, Index ranks) {
  std::vector<std::vector<Index>> slots(static_cast<std::size_t>(ranks));
  Index next = 0;
  for (Index rank = 0; rank < ranks; ++rank) {
    auto& own = slots[static_cast<std::size_t>(rank)];
    if (assignment == "chunk") {
      own = chunk_list(range(0, experts), ranks, rank);
    } else if (assignment == "balanced") {
      const Index size = experts / ranks + (rank < experts % ranks ? 1 : 0);
      own = range(next, next + size);
      next += size;
    } else {
      for (Index expert = rank; expert < experts; expert += ranks) {
        own.push_back(expert);
      }
    }
  }
  return slots;
}

Catalogue named_experts(Index count, const Shape& shape) {
  Catalogue catalogue;
  for (Index e = 0; e < count; ++e) {
    catalogue.push_back({"mlp.experts." + text(e) + ".up_proj.weight", DType::f64, shape});
  }
  return catalogue;
}

struct DealCase {
  const char* why;
  const char* assignment;
  Index experts;
  Index ranks;
  std::vector<std::vector<Index>> slots;
};
std::ostream& operator<<(std::ostream& os, const DealCase& c) { return os << c.why; }

const std::vector<DealCase> kDeals = {
    {"chunk 10/4", "chunk", 10, 4, {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}}},
    {"chunk 9/4: the last has none", "chunk", 9, 4, {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {}}},
    {"chunk 5/4", "chunk", 5, 4, {{0, 1}, {2, 3}, {4}, {}}},
    {"balanced 10/4", "balanced", 10, 4, {{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}},
    {"balanced 9/4", "balanced", 9, 4, {{0, 1, 2}, {3, 4}, {5, 6}, {7, 8}}},
    {"balanced 5/4", "balanced", 5, 4, {{0, 1}, {2}, {3}, {4}}},
    {"balanced 1/4", "balanced", 1, 4, {{0}, {}, {}, {}}},
    {"round robin 10/4", "round_robin", 10, 4, {{0, 4, 8}, {1, 5, 9}, {2, 6}, {3, 7}}},
    {"even: rank 2 of 4 has globals 4 and 5", "chunk", 8, 4, {{0, 1}, {2, 3}, {4, 5}, {6, 7}}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(ep)

BOOST_DATA_TEST_CASE(experts_go_to_their_ranks_whether_stacked_or_named, bdata::make(kDeals), c) {
  const Options options = {{"assignment", c.assignment}};
  Catalogue catalogue = named_experts(c.experts, {3});
  catalogue.push_back({"mlp.experts.w1", DType::f64, {c.experts, 4, 3}});
  Trainers trainers("ep", options, static_cast<Rank>(c.ranks), catalogue);
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST((dealt(c.assignment, c.experts, c.ranks) == c.slots));
  for (Rank rank = 0; rank < c.ranks; ++rank) {
    const auto& own = c.slots[static_cast<std::size_t>(rank)];
    BOOST_TEST(trainers.rows(rank, "mlp.experts.w1") == own, boost::test_tools::per_element());
    std::vector<Index> named;
    for (Index e = 0; e < c.experts; ++e) {
      if (!trainers.held(rank, "mlp.experts." + text(e) + ".up_proj.weight").empty()) {
        named.push_back(e);
      }
    }
    BOOST_TEST(named == own, boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(dense_and_sparse_meshes_lie_over_the_same_ranks) {
  // fsdp 4, tensor 2, ep 4: efsdp 2; rank 5 is dense (2, 1) and sparse (1, 1).
  Trainers trainers("ep",
                    {{"tensor_parallel", "2"},
                     {"tensor_parallel_plan", "attn.*:column"},
                     {"expert_parallel", "4"}},
                    8,
                    {{"attn.wq", DType::f64, {16}},
                     {"norm", DType::f64, {8}},
                     {"moe.experts.w1", DType::f64, {8, 4, 3}},
                     {"moe.shared_experts.w1", DType::f64, {8, 3}}});
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST(trainers.rows(5, "attn.wq") == range(12, 14));  // tensor half 1, its third quarter
  BOOST_TEST(trainers.rows(5, "norm") == range(4, 6));
  BOOST_TEST(trainers.rows(5, "moe.experts.w1") == range(3, 4));  // experts 2, 3; shard 1
  BOOST_TEST(trainers.rows(5, "moe.shared_experts.w1") == range(4, 6));
  BOOST_TEST((trainers.param("moe.experts.w1").shape == Shape{8, 4, 3}));
}

BOOST_AUTO_TEST_CASE(more_ranks_than_experts_cut_dimension_1) {
  for (const char* assignment : {"chunk", "balanced", "round_robin"}) {
    Trainers trainers("ep", {{"expert_parallel", "2"}, {"assignment", assignment}}, 8,
                      {{"experts.w1", DType::f64, {4, 8, 3}}});
    BOOST_TEST(breach(trainers) == "");
    BOOST_TEST(trainers.rows(5, "experts.w1") == dealt(assignment, 4, 2)[1]);
    BOOST_TEST(trainers.rows(5, "experts.w1", 1) == range(4, 6));  // shard 2 of 4
    BOOST_TEST(refuses("ep", {{"expert_parallel", "2"}, {"assignment", assignment}}, 8,
                       {{"experts.w1", DType::f64, {4, 6, 3}}}, Errc::bad_argument,
                       "parameter 'experts.w1' [4, 6, 3]"));
  }
}

BOOST_AUTO_TEST_CASE(random_stacks_equal_dealt_experts_cut_by_fsdp) {
  std::mt19937_64 random(99);
  const auto draw = [&](Index least, Index most) {
    return least + static_cast<Index>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  const std::vector<std::string> assignments = {"chunk", "balanced", "round_robin"};
  for (int round = 0; round < 200; ++round) {
    const auto& assignment = assignments[static_cast<std::size_t>(draw(0, 2))];
    const Index replicas = draw(1, 2);
    const Index shards = draw(1, 3);
    const Index ep = draw(1, 4);
    const Index experts = assignment == "chunk" ? ep * draw(1, 3) : draw(1, 10);
    const Index rows = shards * draw(1, 2);
    const auto ranks = static_cast<Rank>(replicas * shards * ep);
    Trainers trainers(
        "ep",
        {{"expert_parallel", text(ep)}, {"replicas", text(replicas)}, {"assignment", assignment}},
        ranks, {{"experts.w", DType::f64, {experts, rows, 2}}, {"d", DType::f64, {5, 2}}});
    BOOST_TEST_INFO(assignment << " " << experts << " experts over " << replicas << "x" << shards
                               << "x" << ep);
    BOOST_TEST(breach(trainers) == "");
    for (Rank rank = 0; rank < ranks; ++rank) {
      auto own = dealt(assignment, experts, ep)[static_cast<std::size_t>(rank % ep)];
      const Index shard = rank / ep % shards;
      std::size_t storage = (own.size() + static_cast<std::size_t>(shards) - 1) /
                            static_cast<std::size_t>(shards) * static_cast<std::size_t>(rows * 2);
      std::vector<Index> own_rows = range(0, rows);
      if (shards * ep > experts && shards > 1) {
        own_rows = chunk_list(own_rows, shards, shard);
        storage = own.size() * own_rows.size() * 2;
      } else {
        own = chunk_list(own, shards, shard);
      }
      Picture expected;
      for (const Index expert : own) {
        for (const Index row : own_rows) {
          const Index flat = (expert * rows + row) * 2;
          expected = expected + elements("experts.w", {flat, flat + 1});
        }
      }
      expected = expected + padding(storage - expected.size());
      BOOST_TEST(trainers.picture(rank, "experts.w") == expected);
    }
  }
}

BOOST_AUTO_TEST_CASE(named_experts_are_cut_over_the_expert_shards) {
  // 2 replicas, efsdp 2, ep 2.
  Trainers trainers("ep", {{"expert_parallel", "2"}, {"replicas", "2"}}, 8,
                    named_experts(4, {3, 2}));
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < 8; ++rank) {
    for (Index e = 0; e < 4; ++e) {
      const bool owner = rank % 2 == e / 2;
      const auto rows = chunk_list(range(0, 3), 2, rank / 2 % 2);
      BOOST_TEST(trainers.rows(rank, "mlp.experts." + text(e) + ".up_proj.weight") ==
                 (owner ? rows : std::vector<Index>{}));
    }
  }
}

BOOST_AUTO_TEST_CASE(what_fsdp_leaves_alone_is_whole_where_its_layer_or_expert_is) {
  Catalogue catalogue = named_experts(4, {3, 2});
  for (Index e = 0; e < 4; ++e) {
    catalogue.push_back({"mlp.experts." + text(e) + ".up_proj.weight_scale", DType::f32, {}});
  }
  catalogue.push_back({"self_attn.q_proj.weight_scale", DType::f32, {}});
  Trainers trainers("ep", {{"expert_parallel", "2"}, {"buffers", "*_scale"}}, 4, catalogue);
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < 4; ++rank) {
    BOOST_TEST(trainers.held(rank, "self_attn.q_proj.weight_scale").size() == 1U);
    BOOST_TEST(trainers.held(rank, "mlp.experts.3.up_proj.weight_scale").size() ==
               (rank % 2 == 1 ? 1U : 0U));
  }
  BOOST_TEST(refuses("ep", {}, 4, catalogue, Errc::bad_argument, "a scalar cannot be sharded"));
}

BOOST_AUTO_TEST_CASE(experts_must_count_from_0_without_holes) {
  auto catalogue = named_experts(4, {2});
  catalogue.erase(catalogue.begin() + 1);
  BOOST_TEST(refuses("ep", {}, 2, catalogue, Errc::bad_argument,
                     "parameter 'mlp.experts.1.up_proj.weight' is missing"));
  catalogue = named_experts(4, {2});
  catalogue.push_back({"mlp.experts.0.down_proj.weight", DType::f64, {2}});
  BOOST_TEST(refuses("ep", {}, 2, catalogue, Errc::bad_argument, "exists for 4 experts"));
}

struct RefusalCase {
  const char* why;
  Options options;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const RefusalCase& c) { return os << c.why; }

const std::vector<RefusalCase> kRefusals = {
    {"unknown key", {{"ep", "2"}}, "the choices are assignment, buffers"},
    {"unknown assignment", {{"assignment", "linear"}}, "chunk, balanced, round_robin"},
    {"ep does not divide", {{"expert_parallel", "3"}}, "does not divide the 4 ranks"},
    {"replicas do not divide", {{"replicas", "3"}}, "does not divide the 4 trainer"},
    {"tensor does not divide", {{"tensor_parallel", "3"}}, "does not divide the 4 ranks"},
};

BOOST_DATA_TEST_CASE(bad_requests_are_refused, bdata::make(kRefusals), c) {
  BOOST_TEST(refuses("ep", c.options, 4, {{"w", DType::f32, {4}}}, Errc::usage, c.part));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
