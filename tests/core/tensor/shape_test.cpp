// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Shapes, intervals and boxes, against tables and against counting element by element.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {

std::ostream& boost_test_print_type(std::ostream& os, const Dims& dims) {
  return os << to_string(dims);
}
std::ostream& boost_test_print_type(std::ostream& os, const Box& box) {
  return os << to_string(box);
}
std::ostream& boost_test_print_type(std::ostream& os, const Interval& interval) {
  return os << "[" << interval.begin << ", " << interval.end << ")";
}

namespace {

constexpr Index kMax = std::numeric_limits<Index>::max();
constexpr Index kMin = std::numeric_limits<Index>::min();

bool is_bad_argument(const Error& e) { return e.code() == Errc::bad_argument; }

/// Row-major flat indices of the elements of @p box, in its own row-major order.
std::vector<Index> flat_indices(const Shape& shape, const Box& box) {
  std::vector<Index> flat;
  const Index count = element_count(shape);
  for (Index i = 0; i < count; ++i) {
    bool inside = true;
    Index rest = i;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const Index at = rest % shape[d];
      rest /= shape[d];
      inside = inside && at >= box.lo[d] && at < box.hi[d];
    }
    if (inside) {
      flat.push_back(i);
    }
  }
  return flat;
}

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(shape)

BOOST_AUTO_TEST_CASE(dims_hold_up_to_eight_values_and_refuse_the_ninth) {
  Dims dims{1, 2, 3, 4, 5, 6, 7};
  dims.push_back(8);
  BOOST_TEST(dims.size() == 8U);
  BOOST_TEST(dims[7] == 8);
  BOOST_CHECK_EXCEPTION(dims.push_back(9), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION((Dims{1, 2, 3, 4, 5, 6, 7, 8, 9}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(Dims(std::span<const Index>(std::vector<Index>(9, 1))), Error,
                        is_bad_argument);
  BOOST_CHECK_EXCEPTION(Dims::filled(9, 1), Error, is_bad_argument);
  BOOST_TEST(dims.size() == 8U);
}

BOOST_AUTO_TEST_CASE(dims_compare_by_their_values_alone) {
  BOOST_TEST((Dims{1, 2} == Dims{1, 2}));
  BOOST_TEST((Dims{1, 2} != Dims{1, 2, 0}));
  BOOST_TEST((Dims{1, 2} < Dims{1, 3}));
  BOOST_TEST((Dims{1, 2} < Dims{1, 2, 0}));
  BOOST_TEST((Dims{} < Dims{0}));
}

BOOST_AUTO_TEST_CASE(dims_and_boxes_print_as_documented) {
  BOOST_TEST(to_string(Dims{4, 8}) == "[4, 8]");
  BOOST_TEST(to_string(Dims{}) == "[]");
  BOOST_TEST(to_string(Box{{0, 2}, {4, 8}}) == "[0:4, 2:8]");
  BOOST_TEST(to_string(Box{}) == "[]");
}

BOOST_AUTO_TEST_CASE(arithmetic_gives_the_exact_result_up_to_the_limits) {
  BOOST_TEST(checked_mul(kMax, 1) == kMax);
  BOOST_TEST(checked_mul(kMax, -1) == -kMax);
  BOOST_TEST(checked_mul(kMax, 0) == 0);
  BOOST_TEST(checked_mul(Index{1} << 31, Index{1} << 31) == Index{1} << 62);
  BOOST_TEST(checked_add(kMax - 1, 1) == kMax);
  BOOST_TEST(checked_add(kMin, kMax) == -1);
  BOOST_TEST(checked_mul_bytes(std::uint64_t{1} << 32, (std::uint64_t{1} << 32) - 1) ==
             0xffffffff00000000U);
  BOOST_TEST(checked_add_bytes(0xfffffffffffffffeU, 1) == 0xffffffffffffffffU);
}

BOOST_AUTO_TEST_CASE(arithmetic_past_the_limits_is_an_error_that_names_its_subject) {
  const auto names = [](const char* subject) {
    return [subject](const Error& e) {
      return e.code() == Errc::bad_argument &&
             std::string(e.what()).find(subject) != std::string::npos;
    };
  };
  BOOST_CHECK_EXCEPTION(checked_mul(kMax, 2, "rows of w"), Error, names("rows of w"));
  BOOST_CHECK_EXCEPTION(checked_mul(kMin, -1), Error, names("element count"));
  BOOST_CHECK_EXCEPTION(checked_add(kMax, 1, "end of w"), Error, names("end of w"));
  BOOST_CHECK_EXCEPTION(checked_add(kMin, -1), Error, names("element count"));
  BOOST_CHECK_EXCEPTION(checked_mul_bytes(std::uint64_t{1} << 63, 2), Error, names("byte count"));
  BOOST_CHECK_EXCEPTION(checked_add_bytes(0xffffffffffffffffU, 1, "buffer a"), Error,
                        names("buffer a"));
}

struct CountCase {
  const char* why;
  Shape shape;
  Index count;
  Strides strides;
};
std::ostream& operator<<(std::ostream& os, const CountCase& c) { return os << c.why; }

const std::vector<CountCase> kCountCases = {
    {"a scalar has one element", {}, 1, {}},
    {"a vector", {5}, 5, {1}},
    {"a matrix", {4, 8}, 32, {8, 1}},
    {"an extent of 0 empties the tensor and counts as 1 in strides", {4, 0, 3}, 0, {3, 3, 1}},
    {"extents of 1", {1, 7, 1}, 7, {7, 1, 1}},
    {"past 2^31 elements", {262'144, 8'960}, 2'348'810'240, {8'960, 1}},
    {"the largest count", {kMax, 1}, kMax, {1, 1}},
    {"0 wins over a product that would not fit", {0, kMax}, 0, {kMax, 1}},
};

BOOST_DATA_TEST_CASE(shapes_have_their_element_count_and_row_major_strides,
                     bdata::make(kCountCases), c) {
  BOOST_TEST(element_count(c.shape) == c.count);
  BOOST_TEST(row_major(c.shape) == c.strides);
}

BOOST_AUTO_TEST_CASE(impossible_shapes_are_refused) {
  BOOST_CHECK_EXCEPTION(element_count({4, -1}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(element_count({0, -1}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(row_major({4, -1}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(element_count({Index{1} << 32, Index{1} << 31}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(row_major({2, Index{1} << 32, Index{1} << 31}), Error, is_bad_argument);
}

BOOST_AUTO_TEST_CASE(indices_and_bytes_past_two_to_the_31_do_not_wrap) {
  const Strides strides = row_major({262'144, 8'960});
  BOOST_TEST(239'673 * strides[0] + 8'959 == 2'147'479'039);
  BOOST_TEST(239'674 * strides[0] + 8'959 == 2'147'487'999);
  BOOST_TEST(checked_mul_bytes((std::uint64_t{1} << 30) + 1, bytes_of(DType::bf16)) ==
             2'147'483'650U);
}

struct PartsCase {
  Index extent;
  Index count;
  std::vector<Index> chunks;
  std::vector<Index> balanced;
};
std::ostream& operator<<(std::ostream& os, const PartsCase& c) {
  return os << c.extent << " in " << c.count;
}

const std::vector<PartsCase> kPartsCases = {
    {10, 4, {3, 3, 3, 1}, {3, 3, 2, 2}},
    {9, 4, {3, 3, 3, 0}, {3, 2, 2, 2}},
    {5, 4, {2, 2, 1, 0}, {2, 1, 1, 1}},
    {12, 8, {2, 2, 2, 2, 2, 2, 0, 0}, {2, 2, 2, 2, 1, 1, 1, 1}},
    {1, 4, {1, 0, 0, 0}, {1, 0, 0, 0}},
    {0, 3, {0, 0, 0}, {0, 0, 0}},
    {8, 1, {8}, {8}},
    {151'936,
     7,
     {21'706, 21'706, 21'706, 21'706, 21'706, 21'706, 21'700},
     {21'706, 21'705, 21'705, 21'705, 21'705, 21'705, 21'705}},
    {kMax, 3, {kMax / 3 + 1, kMax / 3 + 1, kMax / 3 - 1}, {kMax / 3 + 1, kMax / 3, kMax / 3}},
};

BOOST_DATA_TEST_CASE(parts_have_their_sizes_and_follow_one_another, bdata::make(kPartsCases), c) {
  for (const auto& [part, sizes] : {std::pair{&chunk, c.chunks}, {&balanced_part, c.balanced}}) {
    Index at = 0;
    for (Index i = 0; i < c.count; ++i) {
      const Index size = sizes[static_cast<std::size_t>(i)];
      BOOST_TEST(part(c.extent, c.count, i) == (Interval{at, at + size}));
      at += size;
    }
    BOOST_TEST(at == c.extent);
  }
}

BOOST_AUTO_TEST_CASE(more_parts_than_two_to_the_31_do_not_wrap) {
  BOOST_TEST(chunk(kMax, kMax, kMax - 1) == (Interval{kMax - 1, kMax}));
  BOOST_TEST(chunk(3, kMax, kMax - 1) == (Interval{3, 3}));
  BOOST_TEST(balanced_part(kMax, kMax - 1, kMax - 2) == (Interval{kMax - 1, kMax}));
}

BOOST_AUTO_TEST_CASE(parts_that_do_not_exist_are_refused) {
  for (const auto& part : {&chunk, &balanced_part}) {
    BOOST_CHECK_EXCEPTION(part(-1, 2, 0), Error, is_bad_argument);
    BOOST_CHECK_EXCEPTION(part(4, 0, 0), Error, is_bad_argument);
    BOOST_CHECK_EXCEPTION(part(4, 2, 2), Error, is_bad_argument);
    BOOST_CHECK_EXCEPTION(part(4, 2, -1), Error, is_bad_argument);
  }
}

struct IntersectCase {
  const char* why;
  Box a;
  Box b;
  std::optional<Box> common;
  bool contains;  ///< a contains b
};
std::ostream& operator<<(std::ostream& os, const IntersectCase& c) { return os << c.why; }

const std::vector<IntersectCase> kIntersectCases = {
    {"scalars meet", {}, {}, Box{}, true},
    {"equal boxes", {{1, 2}, {3, 4}}, {{1, 2}, {3, 4}}, Box{{1, 2}, {3, 4}}, true},
    {"a contained box", {{0, 0}, {9, 9}}, {{3, 4}, {5, 9}}, Box{{3, 4}, {5, 9}}, true},
    {"a common corner", {{0, 0}, {4, 4}}, {{2, 3}, {6, 8}}, Box{{2, 3}, {4, 4}}, false},
    {"touching boxes share nothing", {{0, 0}, {4, 4}}, {{0, 4}, {4, 8}}, std::nullopt, false},
    {"boxes apart in one dimension", {{0, 0}, {4, 4}}, {{1, 6}, {2, 8}}, std::nullopt, false},
    {"an empty box at the end is inside, and shares nothing",
     {{0, 0}, {4, 4}},
     {{4, 0}, {4, 4}},
     std::nullopt,
     true},
    {"an empty box past the end is not inside",
     {{0, 0}, {4, 4}},
     {{5, 0}, {5, 4}},
     std::nullopt,
     false},
};

BOOST_DATA_TEST_CASE(boxes_have_their_common_part, bdata::make(kIntersectCases), c) {
  BOOST_TEST((intersect(c.a, c.b) == c.common));
  BOOST_TEST((intersect(c.b, c.a) == c.common));
  BOOST_TEST(c.a.contains(c.b) == c.contains);
}

BOOST_AUTO_TEST_CASE(boxes_know_their_size) {
  BOOST_TEST(Box{}.volume() == 1);
  BOOST_TEST(!Box{}.empty());
  BOOST_TEST((Box{{1, 2}, {3, 6}}.volume()) == 8);
  BOOST_TEST((Box{{1, 2}, {3, 6}}.extents()) == (Dims{2, 4}));
  BOOST_TEST((Box{{3, 2}, {3, 6}}.empty()));
  BOOST_TEST((Box{{3, 2}, {1, 6}}.volume()) == 0);
  BOOST_TEST((Box{{3, 2}, {1, 6}}.extents()) == (Dims{0, 4}));
  BOOST_TEST(Box::whole({2, 3}) == (Box{{0, 0}, {2, 3}}));
  BOOST_TEST(!(Box{{0}, {4}}.contains(Box{{0, 0}, {1, 1}})));
}

BOOST_AUTO_TEST_CASE(a_difference_of_boxes_covers_each_element_that_is_left_once) {
  std::mt19937_64 random(3);
  const auto draw = [&](Index low, Index high) {
    return std::uniform_int_distribution<Index>(low, high)(random);
  };
  std::size_t most = 0;
  for (int round = 0; round < 2000; ++round) {
    Shape shape;
    Box a;
    Box b;
    for (Index d = draw(0, 4); d > 0; --d) {
      const Index extent = draw(1, 5);
      shape.push_back(extent);
      for (Box* box : {&a, &b}) {
        const Index lo = draw(0, extent - 1);
        box->lo.push_back(lo);
        box->hi.push_back(draw(1, 20) == 1 ? lo : draw(lo + 1, extent));
      }
    }
    std::vector<Box> left{Box::whole(shape)};  // appended to, not replaced
    subtract(a, b, left);
    BOOST_TEST_REQUIRE(left.size() <= 1 + std::max<std::size_t>(2 * shape.size(), 1));
    std::vector<int> times(static_cast<std::size_t>(element_count(shape)), 0);
    for (std::size_t i = 1; i < left.size(); ++i) {
      BOOST_TEST(!left[i].empty());
      for (const Index at : flat_indices(shape, left[i])) {
        ++times[static_cast<std::size_t>(at)];
      }
    }
    std::vector<int> expected(times.size(), 0);
    for (const Index at : flat_indices(shape, a)) {
      expected[static_cast<std::size_t>(at)] = 1;
    }
    for (const Index at : flat_indices(shape, b)) {
      expected[static_cast<std::size_t>(at)] = 0;
    }
    BOOST_TEST_REQUIRE(times == expected, to_string(a) << " without " << to_string(b));
    most = std::max(most, left.size() - 1);
  }
  BOOST_TEST(most >= 4U);  // the draws were worth something
}

struct FlatCase {
  const char* why;
  Shape shape;
  Interval flat;
  std::vector<Box> boxes;
};
std::ostream& operator<<(std::ostream& os, const FlatCase& c) { return os << c.why; }

const std::vector<FlatCase> kFlatCases = {
    {"whole rows, then a part of one", {3, 4}, {0, 10}, {{{0, 0}, {2, 4}}, {{2, 0}, {3, 2}}}},
    {"the rest of a row", {3, 4}, {10, 12}, {{{2, 2}, {3, 4}}}},
    {"partial row, whole rows, partial row",
     {4, 4},
     {1, 14},
     {{{0, 1}, {1, 4}}, {{1, 0}, {3, 4}}, {{3, 0}, {4, 2}}}},
    {"inside one row", {3, 4}, {5, 7}, {{{1, 1}, {2, 3}}}},
    {"all of it", {2, 3, 4}, {0, 24}, {{{0, 0, 0}, {2, 3, 4}}}},
    {"five boxes of a cube",
     {4, 3, 3},
     {1, 35},
     {{{0, 0, 1}, {1, 1, 3}},
      {{0, 1, 0}, {1, 3, 3}},
      {{1, 0, 0}, {3, 3, 3}},
      {{3, 0, 0}, {4, 2, 3}},
      {{3, 2, 0}, {4, 3, 2}}}},
    {"extents of 1 do not split", {4, 1, 3}, {3, 12}, {{{1, 0, 0}, {4, 1, 3}}}},
    {"nothing", {3, 4}, {5, 5}, {}},
    {"a scalar", {}, {0, 1}, {{{}, {}}}},
    {"nothing of a scalar", {}, {1, 1}, {}},
    {"nothing of an empty tensor", {3, 0}, {0, 0}, {}},
    {"past 2^31 elements",
     {262'144, 8'960},
     {2'147'487'999, 2'147'488'000},
     {{{239'674, 8'959}, {239'675, 8'960}}}},
};

BOOST_DATA_TEST_CASE(flat_ranges_give_their_boxes, bdata::make(kFlatCases), c) {
  BOOST_TEST(boxes_of_flat_range(c.shape, c.flat) == c.boxes, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(every_flat_range_of_small_shapes_is_covered_in_order_by_few_boxes) {
  for (const Shape& shape : std::vector<Shape>{{},
                                               {1},
                                               {7},
                                               {3, 5},
                                               {1, 6},
                                               {6, 1},
                                               {2, 3, 4},
                                               {4, 1, 3},
                                               {1, 1, 1},
                                               {3, 2, 1, 4},
                                               {2, 2, 2, 2, 2},
                                               {2, 1, 2, 3, 1, 2, 1, 2}}) {
    const Index count = element_count(shape);
    const std::size_t most = std::max<std::size_t>(2 * shape.size(), 2) - 1;
    for (Index begin = 0; begin <= count; ++begin) {
      for (Index end = begin; end <= count; ++end) {
        const std::vector<Box> boxes = boxes_of_flat_range(shape, {begin, end});
        BOOST_TEST_REQUIRE(boxes.size() <= most, to_string(shape) << " " << begin << " " << end);
        Index next = begin;
        for (const Box& box : boxes) {
          for (const Index at : flat_indices(shape, box)) {
            BOOST_TEST_REQUIRE(at == next, to_string(shape) << " " << begin << " " << end);
            ++next;
          }
        }
        BOOST_TEST_REQUIRE(next == end, to_string(shape) << " " << begin << " " << end);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(flat_ranges_outside_the_tensor_are_refused) {
  for (const Interval flat : {Interval{-1, 2}, Interval{0, 13}, Interval{5, 4}, Interval{13, 13}}) {
    BOOST_CHECK_EXCEPTION(boxes_of_flat_range({3, 4}, flat), Error, is_bad_argument);
  }
  BOOST_CHECK_EXCEPTION(boxes_of_flat_range({3, 0}, {0, 1}), Error, is_bad_argument);
  BOOST_CHECK_EXCEPTION(boxes_of_flat_range({}, {0, 2}), Error, is_bad_argument);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
