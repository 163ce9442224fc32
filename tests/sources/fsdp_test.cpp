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

/// What FSDP2 over tensor parallelism really holds: cut for the inner rank, then for the shard.
std::vector<Index> real_rows(Index extent, Index inner, Index shards, Index t, Index s) {
  return chunk_list(chunk_list(range(0, extent), inner, t), shards, s);
}

/// What the placements (StridedShard(0, inner), Shard(0)) say, read left to right.
std::vector<Index> stated_rows(Index extent, Index inner, Index shards, Index t, Index s) {
  std::vector<Index> strided;
  for (Index j = 0; j < inner; ++j) {
    const auto part = chunk_list(chunk_list(range(0, extent), inner, j), shards, s);
    strided.insert(strided.end(), part.begin(), part.end());
  }
  return chunk_list(strided, inner, t);
}

/// [a0 a1 | a2 ...] -> the local part of rank r of a flat buffer of names with pads.
Picture flat_part(const Picture& flat, std::size_t ranks, std::size_t rank) {
  const std::size_t each = (flat.size() + ranks - 1) / ranks;
  Picture part;
  for (std::size_t i = rank * each; i < (rank + 1) * each; ++i) {
    part.push_back(i < flat.size() ? flat[i] : "-");
  }
  return part;
}

/// The flat buffer of a unit, built by appending.
Picture flat_buffer(const Catalogue& members, std::size_t align, std::size_t ranks) {
  Picture flat;
  for (const auto& member : members) {
    while (align > 0 && flat.size() % align != 0) {
      flat.push_back("-");
    }
    flat = flat + elements(member.name, range(0, element_count(member.shape)));
  }
  while (align > 0 && flat.size() % ranks != 0) {
    flat.push_back("-");
  }
  return flat;
}

struct DimCase {
  const char* why;
  Shape shape;
  Rank ranks;
  Options options;
  std::vector<std::vector<Index>> rows;  ///< Of dimension `dim`, by rank.
  std::size_t dim = 0;
};
std::ostream& operator<<(std::ostream& os, const DimCase& c) { return os << c.why; }

std::vector<std::vector<Index>> split_512() {
  std::vector<std::vector<Index>> rows;
  for (Index rank = 0; rank < 28; ++rank) {
    rows.push_back(range(rank * 18, rank * 18 + 18));
  }
  rows.push_back(range(504, 512));
  rows.emplace_back();
  return rows;
}

const std::vector<DimCase> kFsdp2 = {
    {"10 rows over 4", {10, 4}, 4, {}, {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}}},
    {"5 rows over 4: the last is empty", {5, 4}, 4, {}, {{0, 1}, {2, 3}, {4}, {}}},
    {"1 element over 4: only rank 0", {1}, 4, {}, {{0}, {}, {}, {}}},
    {"7 over 3 rounds up, never down", {7}, 3, {}, {{0, 1, 2}, {3, 4, 5}, {6}}},
    {"5 over 2: the global extent stays 5", {5}, 2, {}, {{0, 1, 2}, {3, 4}}},
    {"512 over 30: one short, one empty", {512}, 30, {}, split_512()},
    {"no rows at all", {0, 4}, 2, {}, {{}, {}}},
    {"replicas hold the same",
     {10, 4},
     8,
     {{"replicas", "2"}},
     {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}, {0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}}},
    {"the second dimension, evenly",
     {3, 8, 4},
     4,
     {{"shard_dim", "w:1"}},
     {{0, 1}, {2, 3}, {4, 5}, {6, 7}},
     1},
    {"a negative dimension counts from the end",
     {3, 4},
     2,
     {{"shard_dim", "other:0,w:-1"}},
     {{0, 1}, {2, 3}},
     1},
    {"over 2 tensor-parallel ranks, 8 rows",
     {8, 8},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:column"}},
     {{0, 1}, {4, 5}, {2, 3}, {6, 7}}},
    {"over 2 tensor-parallel ranks, 16 rows",
     {16},
     8,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:column"}},
     {{0, 1}, {8, 9}, {2, 3}, {10, 11}, {4, 5}, {12, 13}, {6, 7}, {14, 15}}},
    {"over 2 tensor-parallel ranks, 6 elements",
     {6},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:column"}},
     {{0, 1}, {3, 4}, {2}, {5}}},
    {"over 2 tensor-parallel ranks, 5 elements",
     {5},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:column"}},
     {{0, 1}, {3}, {2}, {4}}},
    {"1 row over 2, replicated over 4",
     {1, 17},
     8,
     {{"tensor_parallel", "4"}},
     {{0}, {0}, {0}, {0}, {}, {}, {}, {}}},
    {"a 1-D bias of a row-parallel layer is not cut by it",
     {4},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:row"}},
     {{0, 1}, {0, 1}, {2, 3}, {2, 3}}},
    {"row parallel cuts columns, FSDP rows",
     {4, 6},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:row"}},
     {{0, 1, 2}, {3, 4, 5}, {0, 1, 2}, {3, 4, 5}},
     1},
    {"both on the second dimension",
     {3, 8},
     4,
     {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:row"}, {"shard_dim", "w:1"}},
     {{0, 1}, {4, 5}, {2, 3}, {6, 7}},
     1},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(fsdp)

BOOST_DATA_TEST_CASE(fsdp2_gives_each_rank_its_indices, bdata::make(kFsdp2), c) {
  Trainers trainers("fsdp", c.options, c.ranks,
                    {{"w", DType::f64, c.shape}, {"other", DType::f64, {8, 2}}});
  BOOST_TEST(breach(trainers) == "");
  BOOST_TEST((trainers.param("w").shape == c.shape));
  for (Rank rank = 0; rank < c.ranks; ++rank) {
    BOOST_TEST(trainers.rows(rank, "w", c.dim) == c.rows[static_cast<std::size_t>(rank)],
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(fsdp2_allocates_the_first_chunk_and_pads_the_others) {
  Trainers trainers("fsdp", {}, 4, {{"w", DType::f64, {5, 2}}});
  BOOST_TEST(trainers.picture(0, "w") == elements("w", {0, 1, 2, 3}));
  BOOST_TEST(trainers.picture(1, "w") == elements("w", {4, 5, 6, 7}));
  BOOST_TEST(trainers.picture(2, "w") == elements("w", {8, 9}) + padding(2));
  BOOST_TEST(trainers.picture(3, "w") == padding(4));
}

BOOST_AUTO_TEST_CASE(fsdp2_over_tensor_parallelism_is_real_or_refused_for_every_size) {
  int refused = 0;
  for (Index inner = 1; inner <= 4; ++inner) {
    for (Index shards = 1; shards <= 4; ++shards) {
      for (Index extent = 0; extent < 30; ++extent) {
        bool same = true;
        for (Index s = 0; s < shards; ++s) {
          for (Index t = 0; t < inner; ++t) {
            same = same && real_rows(extent, inner, shards, t, s) ==
                               stated_rows(extent, inner, shards, t, s);
          }
        }
        BOOST_TEST((same || extent % inner != 0));
        const Options options = {{"tensor_parallel", text(inner)},
                                 {"tensor_parallel_plan", "w:column"}};
        const Catalogue catalogue = {{"w", DType::f64, {extent, 2}}};
        const auto ranks = static_cast<Rank>(inner * shards);
        if (!same) {
          ++refused;
          BOOST_TEST(refuses("fsdp", options, ranks, catalogue, Errc::bad_argument,
                             "parameter 'w' [" + text(extent) + ", 2]: dimension 0 is cut into"));
          continue;
        }
        Trainers trainers("fsdp", options, ranks, catalogue);
        BOOST_TEST(breach(trainers) == "");
        for (Rank rank = 0; rank < ranks; ++rank) {
          BOOST_TEST(trainers.rows(rank, "w") ==
                         real_rows(extent, inner, shards, rank % inner, rank / inner),
                     boost::test_tools::per_element());
        }
      }
    }
  }
  BOOST_TEST(refused > 0);
  BOOST_TEST(refuses("fsdp", {{"tensor_parallel", "2"}, {"tensor_parallel_plan", "w:column"}}, 6,
                     {{"w", DType::f32, {7}}}, Errc::bad_argument, "dimension 0"));
}

BOOST_AUTO_TEST_CASE(the_default_plan_cuts_linear_layers_and_leaves_norms) {
  const std::string layer = "model.layers.0.";
  Trainers trainers("fsdp", {{"tensor_parallel", "2"}}, 4,
                    {{layer + "self_attn.q_proj.weight", DType::f32, {8, 4}},
                     {layer + "self_attn.o_proj.weight", DType::f32, {4, 8}},
                     {layer + "input_layernorm.weight", DType::f32, {4}},
                     {"encoder.layer.1.attention.output.dense.bias", DType::f32, {4}}});
  const auto q = layer + "self_attn.q_proj.weight";
  BOOST_TEST(trainers.rows(1, q) == (std::vector<Index>{4, 5}), boost::test_tools::per_element());
  const auto o = layer + "self_attn.o_proj.weight";
  BOOST_TEST(trainers.rows(1, o, 1) == range(4, 8), boost::test_tools::per_element());
  for (const std::string& whole : {layer + "input_layernorm.weight",
                                   std::string("encoder.layer.1.attention.output.dense.bias")}) {
    BOOST_TEST(trainers.rows(0, whole) == trainers.rows(1, whole),
               boost::test_tools::per_element());
  }
  BOOST_TEST(breach(trainers) == "");
}

struct FlatCase {
  const char* why;
  DType dtype;
  Options options;
  std::vector<Index> counts;
  std::vector<Picture> parts;
};
std::ostream& operator<<(std::ostream& os, const FlatCase& c) { return os << c.why; }

// A has 12 elements as [3, 4], b has 5, C has 6 as [2, 3]; p and q are 1-D.
const std::vector<FlatCase> kFlat = {
    {"bf16 with original parameters: members start at multiples of 8",
     DType::bf16,
     {{"use_orig_params", "true"}},
     {},
     {elements("A", range(0, 10)),
      elements("A", {10, 11}) + padding(4) + elements("b", range(0, 4)),
      elements("b", {4}) + padding(3) + elements("C", range(0, 6))}},
    {"bf16 without: nothing between, zeros behind",
     DType::bf16,
     {},
     {},
     {elements("A", range(0, 8)), elements("A", range(8, 12)) + elements("b", range(0, 4)),
      elements("b", {4}) + elements("C", range(0, 6)) + padding(1)}},
    {"an alignment in elements",
     DType::bf16,
     {{"align", "5"}},
     {},
     {elements("A", range(0, 9)),
      elements("A", range(9, 12)) + padding(3) + elements("b", range(0, 3)),
      elements("b", {3, 4}) + elements("C", range(0, 6)) + padding(1)}},
    {"f32 at multiples of 4",
     DType::f32,
     {{"use_orig_params", "true"}},
     {3, 5},
     {elements("p", {0, 1, 2}) + padding(1) + elements("q", {0}),
      elements("q", range(1, 5)) + padding(1)}},
    {"f32 without alignment splits elsewhere",
     DType::f32,
     {{"use_orig_params", "false"}},
     {3, 5},
     {elements("p", {0, 1, 2}) + elements("q", {0}), elements("q", range(1, 5))}},
};

BOOST_DATA_TEST_CASE(fsdp1_lays_out_the_flat_buffer, bdata::make(kFlat), c) {
  Catalogue catalogue = {{"A", c.dtype, {3, 4}}, {"b", c.dtype, {5}}, {"C", c.dtype, {2, 3}}};
  if (!c.counts.empty()) {
    catalogue = {{"p", c.dtype, {c.counts[0]}}, {"q", c.dtype, {c.counts[1]}}};
  }
  Options options = c.options;
  options["version"] = "1";
  Trainers trainers("fsdp", options, static_cast<Rank>(c.parts.size()), catalogue);
  BOOST_TEST(breach(trainers) == "");
  for (std::size_t rank = 0; rank < c.parts.size(); ++rank) {
    BOOST_TEST(trainers.picture(static_cast<Rank>(rank), catalogue[0].name) == c.parts[rank],
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(fsdp1_shard_starts_inside_a_row) {
  Trainers trainers(
      "fsdp", {{"version", "1"}, {"use_orig_params", "true"}}, 3,
      {{"A", DType::bf16, {3, 4}}, {"b", DType::bf16, {5}}, {"C", DType::bf16, {2, 3}}});
  BOOST_TEST(trainers.held(0, "A") == range(0, 10), boost::test_tools::per_element());
  BOOST_TEST(trainers.held(1, "A") == range(10, 12), boost::test_tools::per_element());
  BOOST_TEST(trainers.param("A").side.layout->pieces_of(0).size() == 2U);  // rows 0-1, part of 2
}

BOOST_AUTO_TEST_CASE(fsdp1_hybrid_shards_repeat_in_every_replica) {
  // 16 ranks in groups of 8: rank 13 is shard 5 of replica 1, with the bytes of rank 5.
  Trainers trainers("fsdp", {{"version", "1"}, {"replicas", "2"}}, 16,
                    {{"A", DType::f64, {5, 7}}, {"b", DType::f64, {9}}});
  BOOST_TEST(breach(trainers) == "");
  for (Rank rank = 0; rank < 8; ++rank) {
    BOOST_TEST(trainers.picture(rank, "A") == trainers.picture(rank + 8, "A"));
    BOOST_TEST(trainers.held(rank, "b") == trainers.held(rank + 8, "b"));
  }
  BOOST_TEST(
      trainers.picture(13, "A") ==
      flat_part(flat_buffer({{"A", DType::f64, {5, 7}}, {"b", DType::f64, {9}}}, 0, 8), 8, 5));
}

BOOST_AUTO_TEST_CASE(fsdp1_units_are_layers_and_the_rest) {
  const Catalogue catalogue = {
      {"embed.weight", DType::f64, {3, 2}},   {"model.layers.0.a", DType::f64, {3}},
      {"model.layers.0.b", DType::f64, {2}},  {"model.layers.10.a", DType::f64, {3}},
      {"model.layers.10.b", DType::f64, {2}}, {"norm", DType::f64, {1}}};
  Trainers layers("fsdp", {{"version", "1"}}, 2, catalogue);
  BOOST_TEST(breach(layers) == "");
  BOOST_TEST(layers.picture(0, "embed.weight") == elements("embed.weight", range(0, 4)));
  BOOST_TEST(layers.picture(1, "norm") ==
             elements("embed.weight", {4, 5}) + elements("norm", {0}) + padding(1));
  BOOST_TEST(layers.picture(1, "model.layers.10.a") ==
             elements("model.layers.10.b", {0, 1}) + padding(1));
  BOOST_TEST(layers.param("model.layers.0.b").side.buffers.at(0) == "model.layers.0._flat_param");
  BOOST_TEST((layers.param("model.layers.0.b").side.layout ==
              layers.param("model.layers.10.b").side.layout));
  Trainers all("fsdp", {{"version", "1"}, {"units", "all"}}, 2, catalogue);
  BOOST_TEST(breach(all) == "");
  BOOST_TEST(all.picture(1, "norm") == flat_part(flat_buffer(catalogue, 0, 2), 2, 1));
}

BOOST_AUTO_TEST_CASE(fsdp1_flat_buffers_equal_appended_members_for_random_sizes) {
  std::mt19937_64 random(20240807);
  const auto draw = [&](Index most) {
    return static_cast<Index>(random() % static_cast<std::uint64_t>(most + 1));
  };
  for (int round = 0; round < 200; ++round) {
    Catalogue catalogue;
    const Index members = 1 + draw(4);
    for (Index i = 0; i < members; ++i) {
      Shape shape;
      for (Index d = draw(2); d >= 0; --d) {
        shape.push_back(draw(4));
      }
      catalogue.push_back({std::string(1, static_cast<char>('a' + i)), DType::f32, shape});
    }
    const Index align = draw(5);
    const Index shards = 1 + draw(4);
    const Index replicas = 1 + draw(1);
    Trainers trainers("fsdp",
                      {{"version", "1"}, {"align", text(align)}, {"replicas", text(replicas)}},
                      static_cast<Rank>(shards * replicas), catalogue);
    BOOST_TEST(breach(trainers) == "");
    const Picture flat =
        flat_buffer(catalogue, static_cast<std::size_t>(align), static_cast<std::size_t>(shards));
    for (Rank rank = 0; rank < shards * replicas; ++rank) {
      BOOST_TEST(trainers.picture(rank, "a") == flat_part(flat, static_cast<std::size_t>(shards),
                                                          static_cast<std::size_t>(rank % shards)));
    }
  }
}

BOOST_AUTO_TEST_CASE(buffers_stay_whole_on_every_rank) {
  for (const char* version : {"1", "2"}) {
    Trainers trainers("fsdp", {{"version", version}, {"buffers", "*.position_ids,scale"}}, 3,
                      {{"w", DType::f32, {4, 2}},
                       {"e.position_ids", DType::i64, {1, 5}},
                       {"scale", DType::f32, {}}});
    BOOST_TEST(breach(trainers) == "");
    for (Rank rank = 0; rank < 3; ++rank) {
      BOOST_TEST(trainers.held(rank, "e.position_ids") == range(0, 5));
      BOOST_TEST(trainers.held(rank, "scale") == range(0, 1));
    }
  }
}

struct RefusalCase {
  const char* why;
  Options options;
  Errc code;
  const char* part;
};
std::ostream& operator<<(std::ostream& os, const RefusalCase& c) { return os << c.why; }

const std::vector<RefusalCase> kRefusals = {
    {"unknown key", {{"shards", "2"}}, Errc::usage, "the choices are align, buffers, replicas"},
    {"unknown version", {{"version", "3"}}, Errc::usage, "the choices are 1, 2"},
    {"not a number", {{"replicas", "two"}}, Errc::usage, "whole number of at least 1"},
    {"not positive", {{"replicas", "0"}}, Errc::usage, "whole number of at least 1"},
    {"trailing text", {{"replicas", "2x"}}, Errc::usage, "whole number of at least 1"},
    {"too large a number", {{"replicas", "99999999999999999999"}}, Errc::usage, "whole number"},
    {"replicas do not divide", {{"replicas", "3"}}, Errc::usage, "must divide the 4"},
    {"product does not divide",
     {{"replicas", "2"}, {"tensor_parallel", "4"}},
     Errc::usage,
     "must divide the 4"},
    {"not a boolean",
     {{"version", "1"}, {"use_orig_params", "yes"}, {"skip", "x"}},
     Errc::usage,
     "the choices are true, false"},
    {"FSDP1 key", {{"align", "8"}}, Errc::usage, "'align' needs version=1"},
    {"FSDP2 key",
     {{"version", "1"}, {"shard_dim", "w:1"}},
     Errc::usage,
     "'shard_dim' needs version=2"},
    {"both alignments",
     {{"version", "1"}, {"align", "8"}, {"use_orig_params", "true"}},
     Errc::usage,
     "give one"},
    {"unknown units", {{"version", "1"}, {"units", "two"}}, Errc::usage, "layers, all"},
    {"a pattern that matches nothing", {{"skip", "v*"}}, Errc::usage, "'v*' of option 'skip'"},
    {"a rule that matches nothing", {{"shard_dim", "v:0"}}, Errc::usage, "'v' of option"},
    {"a rule without a word", {{"shard_dim", "w"}}, Errc::usage, "pattern:word"},
    {"a dimension that is none", {{"shard_dim", "w:x"}}, Errc::usage, "pattern:dimension"},
    {"an unknown cut",
     {{"tensor_parallel_plan", "w:diagonal"}},
     Errc::usage,
     "column, row, replicate"},
    {"a dimension too far", {{"shard_dim", "w:2"}}, Errc::bad_argument, "no dimension 2"},
    {"an uneven second dimension",
     {{"shard_dim", "w:1"}},
     Errc::bad_argument,
     "parameter 'w' [4, 6]: FSDP2 cuts dimension 1 evenly only"},
    {"two types in a unit", {{"version", "1"}}, Errc::bad_argument, "parameter 'x' [2]: is bf16"},
};

BOOST_DATA_TEST_CASE(bad_requests_are_refused, bdata::make(kRefusals), c) {
  BOOST_TEST(refuses("fsdp", c.options, 4, {{"w", DType::f32, {4, 6}}, {"x", DType::bf16, {2}}},
                     c.code, c.part));
}

BOOST_AUTO_TEST_CASE(scalars_are_refused_by_name) {
  for (const char* version : {"1", "2"}) {
    BOOST_TEST(refuses("fsdp", {{"version", version}}, 2,
                       {{"w", DType::f32, {4}}, {"scale", DType::f32, {}}}, Errc::bad_argument,
                       "parameter 'scale' []: a scalar cannot be sharded by FSDP"));
  }
}

BOOST_AUTO_TEST_CASE(integers_in_a_flat_unit_are_refused_by_name) {
  BOOST_TEST(refuses("fsdp", {{"version", "1"}}, 2, {{"ids", DType::i64, {4}}}, Errc::bad_argument,
                     "parameter 'ids' [4]: FSDP1 flattens floating-point"));
}

BOOST_AUTO_TEST_CASE(packed_types_are_refused_by_name) {
  BOOST_TEST(refuses("fsdp", {}, 2, {{"w", DType::f4, {4}}}, Errc::bad_argument,
                     "parameter 'w' [4]: elements of f4"));
}

BOOST_AUTO_TEST_CASE(skipped_tensors_are_not_offered) {
  Trainers trainers("fsdp", {{"skip", "*.mask"}}, 2,
                    {{"w", DType::f32, {4}}, {"h.0.mask", DType::f32, {}}});
  BOOST_TEST(trainers.ranks[0]->params().size() == 1U);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
