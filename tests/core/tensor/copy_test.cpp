// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// copy_region() against one memcpy an element, for random regions of every kind.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/copy.hpp"
#include "core/tensor/view.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

using Bytes = std::vector<std::byte>;

std::string describe(const StridedCopy& region) {
  return "extents " + to_string(region.extents) + " source strides " +
         to_string(region.source_strides) + " destination strides " +
         to_string(region.destination_strides) + " " + std::string(to_string(region.source_dtype)) +
         " to " + std::string(to_string(region.destination_dtype));
}

/// Calls @p visit(source offset, destination offset), in elements, for each element of @p region.
template <class Visit>
void for_each_element(const StridedCopy& region, const Visit& visit) {
  const std::size_t rank = region.extents.size();
  if (std::any_of(region.extents.begin(), region.extents.end(), [](Index e) { return e <= 0; })) {
    return;
  }
  Dims at = Dims::filled(rank, 0);
  for (;;) {
    Index source = 0;
    Index destination = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      source += at[d] * region.source_strides[d];
      destination += at[d] * region.destination_strides[d];
    }
    visit(source, destination);
    std::size_t d = rank;
    while (d > 0 && ++at[d - 1] == region.extents[d - 1]) {
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

/// A region between two buffers, each with @p guard bytes to spare on both sides.
struct Bench {
  static constexpr std::uint64_t kGuard = 192;

  StridedCopy region;
  Bytes source;
  Bytes destination;
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;

  Bench(StridedCopy wanted, std::uint64_t source_shift, std::uint64_t destination_shift,
        std::mt19937_64& random)
      : region(std::move(wanted)) {
    source_offset = place(region.source_strides, region.source_item_bytes(), source_shift, source);
    destination_offset = place(region.destination_strides, region.destination_item_bytes(),
                               destination_shift, destination);
    for (Bytes* bytes : {&source, &destination}) {
      std::generate(bytes->begin(), bytes->end(), [&] { return std::byte(random()); });
    }
  }

  Bytes expected() const {
    Bytes bytes = destination;
    for_each_element(region, [&](Index from, Index to) {
      const auto source_item = static_cast<Index>(region.source_item_bytes());
      const auto destination_item = static_cast<Index>(region.destination_item_bytes());
      cast_elements(region.source_dtype,
                    source.data() + static_cast<Index>(source_offset) + from * source_item,
                    region.destination_dtype,
                    bytes.data() + static_cast<Index>(destination_offset) + to * destination_item,
                    1);
    });
    return bytes;
  }

  Bytes copied(bool bypass_cache) const {
    Bytes bytes = destination;
    copy_region(region, source.data() + source_offset, bytes.data() + destination_offset,
                bypass_cache);
    return bytes;
  }

 private:
  std::uint64_t place(const Strides& strides, std::uint64_t item_bytes, std::uint64_t shift,
                      Bytes& bytes) const {
    const std::uint64_t middle = std::uint64_t{1} << 40;
    const ByteSpan span = byte_span(region.extents, {0, middle, strides}, item_bytes);
    const std::uint64_t below = span.end == 0 ? 0 : middle - span.begin;
    const std::uint64_t above = span.end == 0 ? 0 : span.end - middle;
    bytes.resize(kGuard + shift + below + above + kGuard);
    return kGuard + shift + below;
  }
};

class Draw {
 public:
  explicit Draw(std::mt19937_64& random) : random_(random) {}

  Index between(Index low, Index high) {
    return std::uniform_int_distribution<Index>(low, high)(random_);
  }
  bool one_in(Index n) { return between(1, n) == 1; }

  /// A compact layout of @p extents in a random order of the dimensions, with gaps and reversals.
  Strides strides(const Shape& extents, bool permuted) {
    std::vector<std::size_t> order(extents.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
    if (permuted) {
      std::shuffle(order.begin(), order.end(), random_);
    }
    Strides strides = Dims::filled(extents.size(), 0);
    Index stride = one_in(4) ? between(2, 3) : 1;
    for (const std::size_t d : order) {
      strides[d] = one_in(8) ? -stride : stride;
      stride *= std::max<Index>(extents[d], 1);
      stride += one_in(4) ? between(1, 5) : 0;
    }
    return strides;
  }

  StridedCopy region(DType from, DType to) {
    StridedCopy region;
    region.source_dtype = from;
    region.destination_dtype = to;
    const Index rank = between(0, static_cast<Index>(kMaxRank));
    Index left = one_in(5) ? 20'000 : 800;
    for (Index d = 0; d < rank; ++d) {
      const Index extent = one_in(4)    ? 1
                           : one_in(60) ? 0
                                        : between(1, one_in(3) ? left : std::min<Index>(left, 6));
      left = std::max<Index>(left / std::max<Index>(extent, 1), 1);
      region.extents.push_back(extent);
    }
    region.source_strides = strides(region.extents, one_in(2));
    region.destination_strides = strides(region.extents, one_in(2));
    for (Index& stride : region.source_strides) {
      stride = one_in(12) ? 0 : stride;
    }
    return region;
  }

 private:
  std::mt19937_64& random_;
};

struct TypesCase {
  DType from;
  DType to;
};
std::ostream& operator<<(std::ostream& os, const TypesCase& c) {
  return os << to_string(c.from) << " to " << to_string(c.to);
}

std::vector<TypesCase> all_castable_types() {
  std::vector<TypesCase> cases;
  for (const DType from : all_dtypes()) {
    for (const DType to : all_dtypes()) {
      if (is_byte_sized(from) && can_cast(from, to)) {
        cases.push_back({from, to});
      }
    }
  }
  return cases;
}

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(copy)

BOOST_DATA_TEST_CASE(random_regions_copy_each_element_and_nothing_else,
                     bdata::make(all_castable_types()), types) {
  std::mt19937_64 random(20'240 + static_cast<std::uint64_t>(types.from) * 100 +
                         static_cast<std::uint64_t>(types.to));
  Draw draw(random);
  for (int round = 0; round < 400; ++round) {
    const auto source_shift = static_cast<std::uint64_t>(draw.between(0, 70));
    const auto destination_shift = static_cast<std::uint64_t>(draw.between(0, 70));
    const Bench bench(draw.region(types.from, types.to), source_shift, destination_shift, random);
    const Bytes expected = bench.expected();
    for (const bool bypass : {false, true}) {
      BOOST_TEST_REQUIRE((bench.copied(bypass) == expected),
                         describe(bench.region) << (bypass ? " past the caches" : ""));
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_of_every_length_and_alignment_are_whole_with_and_without_the_caches) {
  std::mt19937_64 random(7);
  for (Index row = 1; row < 1400; row += row < 140 ? 1 : 61) {
    for (const std::uint64_t source_shift : {0U, 1U, 31U}) {
      for (const std::uint64_t destination_shift : {0U, 1U, 15U, 33U, 63U}) {
        const Bench bench({{3, row}, {row + 5, 1}, {row + 64, 1}, DType::u8, DType::u8},
                          source_shift, destination_shift, random);
        const Bytes expected = bench.expected();
        BOOST_TEST_REQUIRE((bench.copied(false) == expected), "row of " << row);
        BOOST_TEST_REQUIRE((bench.copied(true) == expected), "row of " << row);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(transposes_larger_than_a_block_are_right_at_the_edges) {
  std::mt19937_64 random(8);
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::f64}) {
    for (const auto& [rows, columns] : std::vector<std::pair<Index, Index>>{
             {31, 33}, {32, 32}, {100, 70}, {3, 500}, {500, 3}, {1100, 2}, {2, 1100}}) {
      const Bench bench({{rows, columns}, {1, rows}, {columns, 1}, dtype, dtype}, 1, 3, random);
      BOOST_TEST((bench.copied(false) == bench.expected()), describe(bench.region));
    }
  }
}

struct SimplifyCase {
  const char* why;
  StridedCopy region;
  Shape extents;
  Strides source;
  Strides destination;
};
std::ostream& operator<<(std::ostream& os, const SimplifyCase& c) { return os << c.why; }

const std::vector<SimplifyCase> kSimplifyCases = {
    {"a single element has no dimension", {{1, 1}, {7, 9}, {5, 3}}, {}, {}, {}},
    {"a scalar stays a scalar", {{}, {}, {}}, {}, {}, {}},
    {"an empty region keeps one dimension", {{4, 0, 3}, {3, 3, 1}, {3, 3, 1}}, {0}, {1}, {1}},
    {"compact on both sides is one row", {{2, 3, 4}, {12, 4, 1}, {12, 4, 1}}, {24}, {1}, {1}},
    {"an extent of 1 does not stop a merge", {{2, 1, 4}, {4, 99, 1}, {4, -5, 1}}, {8}, {1}, {1}},
    {"a gap on one side stops a merge", {{2, 4}, {4, 1}, {5, 1}}, {2, 4}, {4, 1}, {5, 1}},
    {"three dimensions merge into two",
     {{5, 2, 4}, {100, 4, 1}, {8, 4, 1}},
     {5, 8},
     {100, 1},
     {8, 1}},
    {"the destination's order counts", {{2, 3}, {3, 1}, {1, 2}}, {3, 2}, {1, 3}, {2, 1}},
    {"the same order on both sides merges after a permutation",
     {{2, 3}, {1, 2}, {1, 2}},
     {6},
     {1},
     {1}},
    {"repeated reading merges", {{4, 4}, {0, 0}, {4, 1}}, {16}, {0}, {1}},
    {"reversal on both sides merges", {{2, 3}, {-3, -1}, {-3, -1}}, {6}, {-1}, {-1}},
    {"a stride near the end of 64 bits does not wrap into a merge",
     {{2, 4}, {0, Index{1} << 62}, {4, 1}},
     {2, 4},
     {0, Index{1} << 62},
     {4, 1}},
};

BOOST_DATA_TEST_CASE(simplify_gives_the_canonical_region, bdata::make(kSimplifyCases), c) {
  const StridedCopy simple = simplify(c.region);
  BOOST_TEST((simple.extents == c.extents), to_string(simple.extents));
  BOOST_TEST((simple.source_strides == c.source), to_string(simple.source_strides));
  BOOST_TEST((simple.destination_strides == c.destination), to_string(simple.destination_strides));
}

BOOST_AUTO_TEST_CASE(simplify_keeps_every_pair_of_addresses) {
  std::mt19937_64 random(11);
  Draw draw(random);
  for (int round = 0; round < 2000; ++round) {
    const StridedCopy region = draw.region(DType::u16, DType::u16);
    const auto pairs = [](const StridedCopy& r) {
      std::vector<std::pair<Index, Index>> all;
      for_each_element(r, [&](Index from, Index to) { all.emplace_back(to, from); });
      std::sort(all.begin(), all.end());
      return all;
    };
    const StridedCopy simple = simplify(region);
    BOOST_TEST_REQUIRE((pairs(simple) == pairs(region)), describe(region));
    const StridedCopy again = simplify(simple);
    BOOST_TEST_REQUIRE((again.extents == simple.extents), describe(region));
  }
}

BOOST_AUTO_TEST_CASE(types_without_a_cast_are_refused_by_name) {
  const StridedCopy region{{1}, {1}, {1}, DType::i32, DType::f32};
  std::byte bytes[4] = {};
  BOOST_CHECK_EXCEPTION(copy_region(region, bytes, bytes, false), Error, [](const Error& e) {
    const std::string text = e.what();
    return e.code() == Errc::bad_argument && text.find("i32") != text.npos &&
           text.find("f32") != text.npos;
  });
}

BOOST_AUTO_TEST_CASE(a_region_without_a_stride_for_each_dimension_is_refused) {
  BOOST_CHECK_THROW(simplify({{2, 2}, {1}, {2, 1}}), Error);
  BOOST_CHECK_THROW(simplify({{2, 2}, {2, 1}, {2, 1, 1}}), Error);
}

BOOST_AUTO_TEST_CASE(an_empty_region_touches_no_memory) {
  copy_region({{4, 0}, {1, 1}, {1, 1}}, nullptr, nullptr, false);
  copy_region({{0}, {1}, {1}, DType::f32, DType::bf16}, nullptr, nullptr, true);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
