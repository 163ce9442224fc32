// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/layout/layout.hpp"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <map>
#include <ostream>
#include <random>
#include <set>

#include "core/error.hpp"
#include "tests/support/print.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

using Elements = std::vector<Index>;  // global flat indices, in local row-major order

/// What a rank holds of dimension 0, by position in the local tensor: read back from the pieces.
Elements held(const Layout& layout, Rank rank) {
  const CompactShard shard = layout.compact(rank);
  Elements local(static_cast<std::size_t>(element_count(shard.local_shape)), -1);
  const Strides global = row_major(layout.shape());
  const std::uint64_t item = bytes_of(layout.dtype());
  for (const Piece& piece : shard.pieces) {
    Dims at = piece.box.lo;
    for (Index n = 0; n < piece.box.volume(); ++n) {
      Index flat = 0;
      Index local_at = static_cast<Index>(piece.view.offset_bytes / item);
      for (std::size_t d = 0; d < at.size(); ++d) {
        flat += at[d] * global[d];
        local_at += (at[d] - piece.box.lo[d]) * piece.view.strides[d];
      }
      BOOST_TEST_REQUIRE(local_at >= 0);
      BOOST_TEST_REQUIRE(local_at < static_cast<Index>(local.size()));
      BOOST_TEST(local[static_cast<std::size_t>(local_at)] == -1);
      local[static_cast<std::size_t>(local_at)] = flat;
      for (std::size_t d = at.size(); d-- > 0;) {
        if (++at[d] < piece.box.hi[d]) {
          break;
        }
        at[d] = piece.box.lo[d];
      }
    }
  }
  return local;
}

Layout make(const Shape& shape, const Dims& dims, const std::vector<std::string>& placements) {
  std::vector<Placement> parsed;
  for (const std::string& text : placements) {
    parsed.push_back(placement_from_string(text, shape.size()));
  }
  return Layout::sharded(shape, DType::f32, Mesh(dims, 0), parsed);
}

/// A 1-D tensor over a mesh, and what each rank must hold.
struct OneDimensional {
  std::string why;
  Index extent;
  Dims mesh;
  std::vector<std::string> placements;
  std::vector<Elements> expected;
};
std::ostream& operator<<(std::ostream& os, const OneDimensional& c) { return os << c.why; }

const std::vector<OneDimensional> kOneDimensional = {
    {"FSDP2 over TP, even: TP-local tensors are cut, not the whole (A01)",
     8,
     {2, 2},
     {"StridedShard(0,2)", "Shard(0)"},
     {{0, 1}, {4, 5}, {2, 3}, {6, 7}}},
    {"two plain shards cut the first axis first",
     8,
     {2, 2},
     {"Shard(0)", "Shard(0)"},
     {{0, 1}, {2, 3}, {4, 5}, {6, 7}}},
    {"FSDP2 over TP, 6 elements (A02)",
     6,
     {2, 2},
     {"StridedShard(0,2)", "Shard(0)"},
     {{0, 1}, {3, 4}, {2}, {5}}},
    {"FSDP2 over TP, 5 elements (A02)",
     5,
     {2, 2},
     {"StridedShard(0,2)", "Shard(0)"},
     {{0, 1}, {3}, {2}, {4}}},
    {"an uneven strided shard is the union over tp (A04)",
     5,
     {2},
     {"StridedShard(0,2)"},
     {{0, 1, 3}, {2, 4}}},
    {"ceil chunks, not floor (A06)", 7, {3}, {"Shard(0)"}, {{0, 1, 2}, {3, 4, 5}, {6}}},
    {"a tiny dimension cut twice (A08)",
     2,
     {2, 4},
     {"Shard(0)", "Shard(0)"},
     {{0}, {}, {}, {}, {1}, {}, {}, {}}},
    {"nested cuts differ from one cut into six",
     10,
     {2, 3},
     {"Shard(0)", "Shard(0)"},
     {{0, 1}, {2, 3}, {4}, {5, 6}, {7, 8}, {9}}},
    {"one cut into six leaves the last rank empty",
     10,
     {6},
     {"Shard(0)"},
     {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {}}},
    {"Shard then StridedShard encodes another order",
     8,
     {2, 2},
     {"Shard(0)", "StridedShard(0,2)"},
     {{0, 2}, {1, 3}, {4, 6}, {5, 7}}},
    {"replicas hold alike", 4, {2, 2}, {"Replicate", "Shard(0)"}, {{0, 1}, {2, 3}, {0, 1}, {2, 3}}},
    {"T=16, dp=4, tp=2: rank (i,j) holds rows 8j+2i",
     16,
     {4, 2},
     {"StridedShard(0,2)", "Shard(0)"},
     {{0, 1}, {8, 9}, {2, 3}, {10, 11}, {4, 5}, {12, 13}, {6, 7}, {14, 15}}},
    {"the documented trap: sf does not divide T",
     7,
     {3, 2},
     {"StridedShard(0,2)", "Shard(0)"},
     {{0, 1}, {4}, {2, 3}, {5}, {6}, {}}},
};

BOOST_AUTO_TEST_SUITE(layout)
BOOST_AUTO_TEST_SUITE(sharded)

BOOST_DATA_TEST_CASE(every_rank_holds_what_the_mesh_says, bdata::make(kOneDimensional), c) {
  const Layout layout = make({c.extent}, c.mesh, c.placements);
  for (std::size_t rank = 0; rank < c.expected.size(); ++rank) {
    BOOST_TEST_CONTEXT("rank " << rank) {
      BOOST_TEST(held(layout, static_cast<Rank>(rank)) == c.expected[rank],
                 boost::test_tools::per_element());
      BOOST_TEST(layout.compact(static_cast<Rank>(rank)).local_shape ==
                 (Dims{static_cast<Index>(c.expected[rank].size())}));
    }
  }
}

BOOST_AUTO_TEST_CASE(empty_tail_shards_hold_nothing_and_cover_is_exact) {  // A07
  const Layout layout = make({512}, {30}, {"Shard(0)"});
  Index covered = 0;
  for (Rank rank = 0; rank < 30; ++rank) {
    const Index size = layout.compact(rank).local_shape[0];
    BOOST_TEST(size == (rank < 28 ? 18 : rank == 28 ? 8 : 0));
    covered += size;
  }
  BOOST_TEST(covered == 512);
  BOOST_TEST(layout.pieces_of(28).front().piece.box.lo[0] == 504);
  BOOST_TEST(layout.pieces_of(29).empty());
}

BOOST_AUTO_TEST_CASE(an_empty_shard_keeps_its_other_extents) {  // A09
  const Layout layout = make({1, 17}, {2, 4}, {"Shard(0)", "Replicate"});
  for (Rank rank = 0; rank < 4; ++rank) {
    BOOST_TEST(layout.compact(rank).local_shape == (Dims{1, 17}));
  }
  for (Rank rank = 4; rank < 8; ++rank) {
    BOOST_TEST(layout.compact(rank).local_shape == (Dims{0, 17}));
    BOOST_TEST(layout.compact(rank).pieces.empty());
  }
  BOOST_TEST(layout.shape() == (Dims{1, 17}));
}

BOOST_AUTO_TEST_CASE(the_global_shape_is_carried_never_inferred) {  // A10
  const Layout layout = make({5}, {2}, {"Shard(0)"});
  BOOST_TEST(layout.compact(0).local_shape == (Dims{3}));
  BOOST_TEST(layout.compact(1).local_shape == (Dims{2}));
  BOOST_TEST(layout.shape() == (Dims{5}));
}

BOOST_AUTO_TEST_CASE(a_scalar_is_one_element_everywhere_and_cannot_be_sharded) {  // A12
  const Layout layout = make({}, {4}, {"Replicate"});
  for (Rank rank = 0; rank < 4; ++rank) {
    BOOST_TEST(layout.pieces_of(rank).size() == 1U);
    BOOST_TEST(layout.pieces_of(rank).front().piece.box.rank() == 0U);
    BOOST_TEST(layout.compact(rank).local_shape == Dims{});
  }
  BOOST_CHECK_THROW(Layout::sharded({}, DType::f32, Mesh({2}, 0), {Placement::shard(0)}), Error);
}

BOOST_AUTO_TEST_CASE(offsets_above_two_to_the_31_are_exact) {  // A54
  const Layout layout =
      Layout::sharded({262144, 8960}, DType::bf16, Mesh({1}, 0), {Placement::shard(0)});
  const Piece whole = layout.pieces_of(0).front().piece;
  const View last = narrow(whole, {{239674, 8959}, {239675, 8960}}, 2);
  BOOST_TEST(last.offset_bytes == 2ULL * 2147487999ULL);
  BOOST_CHECK_THROW(Layout::sharded({Index{1} << 40, Index{1} << 40}, DType::u8, Mesh({1}, 0),
                                    {Placement::replicate()}),
                    Error);
}

BOOST_AUTO_TEST_CASE(placements_must_match_mesh_and_tensor) {
  BOOST_CHECK_THROW(Layout::sharded({4}, DType::f32, Mesh({2}, 0), {}), Error);
  BOOST_CHECK_THROW(Layout::sharded({4}, DType::f32, Mesh({2}, 0), {Placement::shard(1)}), Error);
}

/// Owner lists by brute force: index lists as arrays, cut as the definition says.
std::vector<Index> brute_force(Index extent, const Dims& mesh, const Dims& at,
                               const std::vector<Placement>& placements, int dim) {
  std::vector<Index> list;
  for (Index i = 0; i < extent; ++i) {
    list.push_back(i);
  }
  const auto take = [](const std::vector<Index>& from, Index parts, Index part) {
    const auto size = static_cast<Index>(from.size());
    const Index c = (size + parts - 1) / parts;
    std::vector<Index> out;
    for (Index i = part * c; i < std::min(size, (part + 1) * c); ++i) {
      out.push_back(from[static_cast<std::size_t>(i)]);
    }
    return out;
  };
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const Placement& p = placements[axis];
    if (p.kind == Placement::Kind::replicate || p.dim != dim) {
      continue;
    }
    std::vector<Index> out;
    for (Index j = 0; j < p.split_factor; ++j) {
      const std::vector<Index> piece = take(take(list, p.split_factor, j), mesh[axis], at[axis]);
      out.insert(out.end(), piece.begin(), piece.end());
    }
    list = out;
  }
  return list;
}

BOOST_AUTO_TEST_CASE(random_meshes_agree_with_index_lists) {
  std::mt19937_64 random(20240607);
  const auto pick = [&](Index lo, Index hi) {
    return std::uniform_int_distribution<Index>(lo, hi)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    Shape shape;
    for (Index d = pick(1, 3); d > 0; --d) {
      shape.push_back(pick(0, 9));
    }
    Dims mesh_dims;
    std::vector<Placement> placements;
    for (Index axis = pick(1, 3); axis > 0; --axis) {
      mesh_dims.push_back(pick(1, 4));
      const int dim = static_cast<int>(pick(0, static_cast<Index>(shape.size()) - 1));
      const Index kind = pick(0, 2);
      placements.push_back(kind == 0   ? Placement::replicate()
                           : kind == 1 ? Placement::shard(dim)
                                       : Placement::strided_shard(dim, pick(1, 4)));
    }
    std::vector<Rank> ranks(static_cast<std::size_t>(element_count(mesh_dims)));
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      ranks[i] = static_cast<Rank>(3 * i + 1);
    }
    std::shuffle(ranks.begin(), ranks.end(), random);
    const Mesh mesh(mesh_dims, ranks);
    const Layout layout = Layout::sharded(shape, DType::bf16, mesh, placements);
    for (std::size_t position = 0; position < ranks.size(); ++position) {
      // Flat indices of the product of the lists, row-major.
      Elements expected{0};
      for (std::size_t d = 0; d < shape.size(); ++d) {
        Elements next;
        const auto list = brute_force(shape[d], mesh_dims, mesh.coordinate(position), placements,
                                      static_cast<int>(d));
        for (const Index flat : expected) {
          for (const Index i : list) {
            next.push_back(flat * shape[d] + i);
          }
        }
        expected = next;
      }
      BOOST_TEST_REQUIRE((held(layout, ranks[position]) == expected));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(flat)

/// LAYOUTS: members A[3,4], b[5], C[2,3] of one bf16 unit over 3 ranks.
BOOST_AUTO_TEST_CASE(aligned_unit_pads_before_each_member_and_at_the_end) {
  const FlatUnit unit = flat_unit({{3, 4}, {5}, {2, 3}}, 8, 3);
  BOOST_TEST(unit.elements == 30);
  BOOST_TEST(unit.members[0].begin == 0);
  BOOST_TEST(unit.members[1].begin == 16);
  BOOST_TEST(unit.members[2].begin == 24);
  const auto layout = [&](std::size_t i) {
    return Layout::flat(unit.members[i].shape, DType::bf16, unit.members[i].begin, unit.elements,
                        {0, 1, 2});
  };
  BOOST_TEST((held(layout(0), 0) == (Elements{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})));
  BOOST_TEST((held(layout(0), 1) == (Elements{10, 11})));
  BOOST_TEST(held(layout(0), 2).empty());
  BOOST_TEST((held(layout(1), 1) == (Elements{0, 1, 2, 3})));
  BOOST_TEST((held(layout(1), 2) == (Elements{4})));
  BOOST_TEST((held(layout(2), 2) == (Elements{0, 1, 2, 3, 4, 5})));
  // Live views: in the rank's part of the flat buffer.
  BOOST_TEST(layout(0).pieces_of(0).size() == 2U);  // rows 0-1, then two elements of row 2
  BOOST_TEST(layout(1).pieces_of(1).front().piece.view.offset_bytes == 6U * 2U);
  BOOST_TEST(layout(2).pieces_of(2).front().piece.view.offset_bytes == 4U * 2U);
}

BOOST_AUTO_TEST_CASE(unaligned_unit_has_no_inner_padding) {
  const FlatUnit unit = flat_unit({{3, 4}, {5}, {2, 3}}, 0, 3);
  BOOST_TEST(unit.elements == 23);
  const auto layout = [&](std::size_t i) {
    return Layout::flat(unit.members[i].shape, DType::f32, unit.members[i].begin, unit.elements,
                        {0, 1, 2});
  };
  BOOST_TEST(held(layout(0), 0).size() == 8U);
  BOOST_TEST((held(layout(0), 1) == (Elements{8, 9, 10, 11})));
  BOOST_TEST((held(layout(1), 1) == (Elements{0, 1, 2, 3})));
  BOOST_TEST((held(layout(1), 2) == (Elements{4})));
  BOOST_TEST((held(layout(2), 2) == (Elements{0, 1, 2, 3, 4, 5})));
}

BOOST_AUTO_TEST_CASE(padding_belongs_to_nobody) {  // A13
  const FlatUnit aligned = flat_unit({{3}, {5}}, 4, 2);
  BOOST_TEST(aligned.elements == 10);
  const auto p1 = Layout::flat({5}, DType::f32, aligned.members[1].begin, aligned.elements, {0, 1});
  BOOST_TEST((held(p1, 0) == (Elements{0})));
  BOOST_TEST((held(p1, 1) == (Elements{1, 2, 3, 4})));
  BOOST_TEST(p1.pieces_of(0).front().piece.view.offset_bytes == 16U);
  const FlatUnit plain = flat_unit({{3}, {5}}, 0, 2);
  const auto q1 = Layout::flat({5}, DType::f32, plain.members[1].begin, plain.elements, {0, 1});
  BOOST_TEST((held(q1, 0) == (Elements{0})));
  BOOST_TEST(q1.pieces_of(0).front().piece.view.offset_bytes == 12U);
}

BOOST_AUTO_TEST_CASE(random_flat_slices_hold_their_range_in_order) {
  std::mt19937_64 random(77);
  const auto pick = [&](Index lo, Index hi) {
    return std::uniform_int_distribution<Index>(lo, hi)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<Shape> shapes;
    for (Index n = pick(1, 4); n > 0; --n) {
      Shape shape;
      for (Index d = pick(1, 4); d > 0; --d) {
        shape.push_back(pick(0, 5));
      }
      shapes.push_back(shape);
    }
    const Index align = pick(0, 3) * 4;
    const std::vector<Rank> ranks = {2, 0, 5, 1};
    const std::vector<Rank> used(ranks.begin(), ranks.begin() + pick(1, 4));
    const FlatUnit unit = flat_unit(shapes, align, used.size());
    const Index c = ceil_div(unit.elements, static_cast<Index>(used.size()));
    for (const FlatMember& member : unit.members) {
      BOOST_TEST((align == 0 || member.begin % align == 0));
      const Layout layout =
          Layout::flat(member.shape, DType::f32, member.begin, unit.elements, used);
      for (std::size_t i = 0; i < used.size(); ++i) {
        Elements expected;
        for (Index e = 0; e < element_count(member.shape); ++e) {
          const Index flat = member.begin + e;
          if (flat >= static_cast<Index>(i) * c && flat < static_cast<Index>(i + 1) * c) {
            expected.push_back(e);
          }
        }
        BOOST_TEST_REQUIRE((held(layout, used[i]) == expected));
        BOOST_TEST_REQUIRE(layout.pieces_of(used[i]).size() <= 2 * member.shape.size() - 1);
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(explicit_pieces)

RankPiece piece(Rank rank, Box box, std::uint32_t buffer, std::uint64_t offset, Strides strides) {
  return {rank, {std::move(box), {buffer, offset, strides}}};
}

BOOST_AUTO_TEST_CASE(a_grid_of_pieces_is_compacted_in_global_order) {
  // Columns 2-3 lie before columns 0-1 in the live buffer.
  const Layout layout = Layout::explicit_pieces(
      {2, 4}, DType::f32, {0},
      {piece(0, {{0, 2}, {2, 4}}, 0, 0, {4, 1}), piece(0, {{0, 0}, {2, 2}}, 0, 8, {4, 1})});
  BOOST_TEST(layout.compact(0).local_shape == (Dims{2, 4}));
  BOOST_TEST((held(layout, 0) == (Elements{0, 1, 2, 3, 4, 5, 6, 7})));
}

BOOST_AUTO_TEST_CASE(pieces_that_form_no_grid_are_laid_end_to_end) {
  const Layout layout = Layout::explicit_pieces(
      {2, 4}, DType::f32, {0},
      {piece(0, {{0, 0}, {1, 4}}, 0, 0, {4, 1}), piece(0, {{1, 1}, {2, 3}}, 0, 16, {4, 1})});
  BOOST_TEST(layout.compact(0).local_shape == (Dims{6}));
  BOOST_TEST((held(layout, 0) == (Elements{0, 1, 2, 3, 5, 6})));
}

BOOST_AUTO_TEST_CASE(ranks_without_pieces_are_known_and_empty_boxes_are_dropped) {
  const Layout layout = Layout::explicit_pieces(
      {2, 4}, DType::f32, {3, 1},
      {piece(1, {{0, 0}, {2, 4}}, 0, 0, {4, 1}), piece(2, {{1, 1}, {1, 4}}, 0, 0, {4, 1})});
  BOOST_TEST((layout.ranks() == std::vector<Rank>{1, 2, 3}));
  BOOST_TEST(layout.pieces().size() == 1U);
  BOOST_TEST(layout.compact(3).local_shape == (Dims{0, 4}));
}

BOOST_AUTO_TEST_CASE(malformed_pieces_are_refused) {
  const auto refused = [](const RankPiece& bad) {
    BOOST_CHECK_THROW(Layout::explicit_pieces({2, 4}, DType::f32, {}, {bad}), Error);
  };
  refused(piece(0, {{0, 0}, {2, 5}}, 0, 0, {4, 1}));
  refused(piece(0, {{-1, 0}, {2, 4}}, 0, 0, {4, 1}));
  refused(piece(0, {{1, 0}, {0, 4}}, 0, 0, {4, 1}));
  refused(piece(0, {{0}, {2}}, 0, 0, {1}));
  refused(piece(0, {{0, 0}, {2, 4}}, 0, 0, {4}));
  refused(piece(0, {{0, 0}, {2, 4}}, 0, 0, {-4, 1}));
  refused(piece(-1, {{0, 0}, {2, 4}}, 0, 0, {4, 1}));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE(identity)

BOOST_AUTO_TEST_CASE(equal_layouts_share_one_object) {
  LayoutTable table;
  const auto a = table.intern(make({8, 8}, {2, 2}, {"Shard(0)", "Shard(1)"}));
  const auto b = table.intern(make({8, 8}, {2, 2}, {"Shard(0)", "Shard(1)"}));
  const auto c = table.intern(make({8, 8}, {2, 2}, {"Shard(1)", "Shard(0)"}));
  BOOST_TEST(a.get() == b.get());
  BOOST_TEST(a.get() != c.get());
  BOOST_TEST(table.size() == 2U);
}

BOOST_AUTO_TEST_CASE(canonical_json_sorts_its_keys_and_shows_the_mesh) {
  const std::string strided =
      R"json({"dtype":"f32","mesh":{"dims":[2,2],"start":0},)json"
      R"json("placements":["StridedShard(0,2)","Shard(0)"],"shape":[8,4]})json";
  BOOST_TEST(make({8, 4}, {2, 2}, {"StridedShard(0,2)", "Shard(0)"}).canonical_json() == strided);
  const std::string listed =
      R"({"dtype":"bf16","mesh":{"dims":[2],"ranks":[5,3]},"placements":["Replicate"],"shape":[4]})";
  const Mesh mesh({2}, std::vector<Rank>{5, 3});
  BOOST_TEST(Layout::sharded({4}, DType::bf16, mesh, {Placement::replicate()}).canonical_json() ==
             listed);
}

BOOST_AUTO_TEST_CASE(sha256_is_the_standard_one) {  // FIPS 180-4 test vectors
  BOOST_TEST(sha256_hex("abc") ==
             "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  BOOST_TEST(sha256_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
