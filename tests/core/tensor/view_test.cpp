// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Spans and parts of views, against the address of each element.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/view.hpp"

namespace m2n {
namespace {

constexpr Index kMax = std::numeric_limits<Index>::max();
constexpr Index kMin = std::numeric_limits<Index>::min();

auto names(const char* part) {
  return [part](const Error& e) {
    return e.code() == Errc::bad_argument && std::string(e.what()).find(part) != std::string::npos;
  };
}

/// Byte address of each element of @p box in row-major order, where @p view starts at @p origin.
std::vector<std::int64_t> addresses(const Box& box, const Dims& origin, const View& view,
                                    std::int64_t item_bytes) {
  std::vector<std::int64_t> all;
  if (box.empty()) {
    return all;
  }
  Dims at = box.lo;
  for (;;) {
    std::int64_t address = static_cast<std::int64_t>(view.offset_bytes);
    for (std::size_t d = 0; d < at.size(); ++d) {
      address += (at[d] - origin[d]) * view.strides[d] * item_bytes;
    }
    all.push_back(address);
    std::size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      --d;
      at[d] = box.lo[d];
    }
    if (d == 0) {
      return all;
    }
  }
}

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(view)

BOOST_AUTO_TEST_CASE(random_views_span_the_bytes_of_their_elements_and_parts_keep_addresses) {
  std::mt19937_64 random(5);
  const auto draw = [&](Index low, Index high) {
    return std::uniform_int_distribution<Index>(low, high)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    Piece piece;
    Box inner;
    piece.view.buffer = 3;
    piece.view.offset_bytes = 1'000'000 + static_cast<std::uint64_t>(draw(0, 9));
    for (Index d = draw(0, 5); d > 0; --d) {
      const Index lo = draw(0, 9);
      const Index hi = lo + draw(draw(1, 8) == 1 ? 0 : 1, 4);
      piece.box.lo.push_back(lo);
      piece.box.hi.push_back(hi);
      piece.view.strides.push_back(draw(-40, 40));
      const Index inner_lo = draw(lo, std::max(lo, hi - 1));
      inner.lo.push_back(inner_lo);
      inner.hi.push_back(draw(1, 16) == 1 ? inner_lo : draw(std::min(inner_lo + 1, hi), hi));
    }
    const Index item = draw(1, 8);
    const auto item_bytes = static_cast<std::uint64_t>(item);

    const auto all = addresses(piece.box, piece.box.lo, piece.view, item);
    const ByteSpan span = byte_span(piece.box.extents(), piece.view, item_bytes);
    if (all.empty()) {
      BOOST_TEST_REQUIRE(span.begin == 0U);
      BOOST_TEST_REQUIRE(span.end == 0U);
    } else {
      const auto [first, last] = std::minmax_element(all.begin(), all.end());
      BOOST_TEST_REQUIRE(static_cast<std::int64_t>(span.begin) == *first);
      BOOST_TEST_REQUIRE(static_cast<std::int64_t>(span.end) == *last + item);
    }

    const View part = narrow(piece, inner, item_bytes);
    BOOST_TEST_REQUIRE(part.buffer == 3U);
    BOOST_TEST_REQUIRE((addresses(inner, inner.lo, part, item) ==
                        addresses(inner, piece.box.lo, piece.view, item)));
  }
}

BOOST_AUTO_TEST_CASE(a_column_shard_of_a_row_shard_keeps_the_stride_of_its_buffer) {
  // Rows 4 to 8 of an 8 x 8 tensor are held; columns 4 to 8 of them are wanted.
  const Piece piece{{{4, 0}, {8, 8}}, {0, 0, {8, 1}}};
  const View view = narrow(piece, {{4, 4}, {8, 8}}, 1);
  BOOST_TEST(view.offset_bytes == 4U);
  BOOST_TEST((view.strides == Strides{8, 1}));
  for (Index row = 0; row < 4; ++row) {
    const View line = narrow(piece, {{4 + row, 4}, {5 + row, 8}}, 1);
    BOOST_TEST(line.offset_bytes == 4U + 8U * static_cast<std::uint64_t>(row));
  }
}

BOOST_AUTO_TEST_CASE(views_past_two_to_the_31_elements_do_not_wrap) {
  const Piece piece{{{0, 0}, {262'144, 8'960}}, {0, 16, {8'960, 1}}};
  const View last = narrow(piece, {{239'674, 8'959}, {239'675, 8'960}}, 2);
  BOOST_TEST(last.offset_bytes == std::uint64_t{4'294'976'014});
  const ByteSpan span = byte_span({262'144, 8'960}, piece.view, 2);
  BOOST_TEST(span.end == std::uint64_t{4'697'620'496});
}

BOOST_AUTO_TEST_CASE(a_view_may_reach_byte_0_but_not_below) {
  BOOST_TEST(byte_span({3}, {0, 4, {-1}}, 2).begin == 0U);
  BOOST_CHECK_EXCEPTION(byte_span({3}, {0, 3, {-1}}, 2), Error, names("below"));
  BOOST_CHECK_EXCEPTION(narrow({{{0}, {3}}, {0, 3, {-1}}}, {{2}, {3}}, 2), Error, names("below"));
}

BOOST_AUTO_TEST_CASE(an_empty_part_has_a_view_even_where_no_byte_could_be) {
  // Element 3 would lie below byte 0.
  BOOST_TEST(narrow({{{0}, {3}}, {0, 2, {-1}}}, {{3}, {3}}, 1).offset_bytes == 2U);
}

BOOST_AUTO_TEST_CASE(views_that_do_not_fit_into_64_bits_are_refused) {
  const std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  BOOST_TEST(byte_span({1}, {0, all - 8, {kMax}}, 8).end == all);
  BOOST_CHECK_EXCEPTION(byte_span({1}, {0, all - 7, {1}}, 8), Error, names("view"));
  BOOST_CHECK_EXCEPTION(byte_span({3}, {0, 0, {kMax}}, 2), Error, names("view"));
  BOOST_CHECK_EXCEPTION(byte_span({3}, {0, 0, {kMin}}, 2), Error, names("view"));
  BOOST_CHECK_EXCEPTION(byte_span({kMax, 2}, {0, 0, {2, 2}}, 2), Error, names("view"));
  BOOST_CHECK_EXCEPTION(narrow({{{0}, {3}}, {0, all - 1, {1}}}, {{2}, {3}}, 1), Error,
                        names("view"));
}

BOOST_AUTO_TEST_CASE(parts_outside_the_piece_and_missing_strides_are_refused) {
  const Piece piece{{{2, 0}, {4, 8}}, {0, 0, {8, 1}}};
  BOOST_CHECK_THROW(narrow(piece, {{1, 0}, {3, 8}}, 2), Error);
  BOOST_CHECK_THROW(narrow(piece, {{2, 0}, {4, 9}}, 2), Error);
  BOOST_CHECK_THROW(narrow(piece, {{2}, {4}}, 2), Error);
  BOOST_CHECK_THROW(byte_span({2, 8}, {0, 0, {1}}, 2), Error);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
