// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Shapes, strides and half-open boxes of element indices, with checked 64-bit arithmetic.

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace m2n {

/// Elements, never bytes. Signed, so that a difference of offsets means something.
using Index = std::int64_t;

/// Largest tensor rank and largest mesh rank.
inline constexpr std::size_t kMaxRank = 8;

/// Up to kMaxRank numbers, stored in place: a shape, strides, or a corner of a box.
class Dims {
 public:
  constexpr Dims() = default;
  /// @throws Error{bad_argument} for more than kMaxRank values (both constructors, push_back).
  Dims(std::initializer_list<Index> values);
  explicit Dims(std::span<const Index> values);
  /// @p rank times @p value.
  static Dims filled(std::size_t rank, Index value);

  void push_back(Index value);

  constexpr std::size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr Index& operator[](std::size_t i) noexcept { return values_[i]; }
  constexpr Index operator[](std::size_t i) const noexcept { return values_[i]; }
  constexpr Index* begin() noexcept { return values_.data(); }
  constexpr Index* end() noexcept { return values_.data() + size_; }
  constexpr const Index* begin() const noexcept { return values_.data(); }
  constexpr const Index* end() const noexcept { return values_.data() + size_; }

  friend bool operator==(const Dims& a, const Dims& b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend std::strong_ordering operator<=>(const Dims& a, const Dims& b) noexcept {
    return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::array<Index, kMaxRank> values_{};  // past size_: zero, so that a copy is a plain copy
  std::uint64_t size_ = 0;
};

using Shape = Dims;    ///< Extents; a scalar has rank 0 and one element.
using Strides = Dims;  ///< Distance, in elements, between neighbours along each dimension.

/// "[4, 8]"; a scalar is "[]".
std::string to_string(const Dims& dims);

/// a * b, a + b. @throws Error{bad_argument} naming @p what when the result does not fit.
Index checked_mul(Index a, Index b, const char* what = "element count");
Index checked_add(Index a, Index b, const char* what = "element count");
std::uint64_t checked_mul_bytes(std::uint64_t a, std::uint64_t b, const char* what = "byte count");
std::uint64_t checked_add_bytes(std::uint64_t a, std::uint64_t b, const char* what = "byte count");

/// Product of the extents; 1 for a scalar, 0 when any extent is 0.
/// @throws Error{bad_argument} for a negative extent or a product above 2^63-1.
Index element_count(const Shape& shape);

/// Strides of the compact row-major tensor of @p shape (an extent of 0 counts as 1).
Strides row_major(const Shape& shape);

/// ceil(a / b) for a >= 0, b > 0.
constexpr Index ceil_div(Index a, Index b) noexcept { return a / b + (a % b != 0 ? 1 : 0); }

/// Half-open range of element indices along one dimension.
struct Interval {
  Index begin = 0;
  Index end = 0;

  constexpr Index size() const noexcept { return end > begin ? end - begin : 0; }
  constexpr bool empty() const noexcept { return end <= begin; }
  friend constexpr auto operator<=>(const Interval&, const Interval&) = default;
};

constexpr Interval intersect(Interval a, Interval b) noexcept {
  const Interval common{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return common.empty() ? Interval{} : common;
}

static_assert(intersect({0, 4}, {4, 8}).empty());  // touching is not overlapping

/// Part @p index of [0, extent) cut into @p count like torch.chunk: c = ceil(extent / count); the
/// last non-empty part may be shorter, and the empty ones lie at @p extent.
Interval chunk(Index extent, Index count, Index index);

/// Part @p index of [0, extent) cut evenly, the remainder to the first parts ("base + remainder").
Interval balanced_part(Index extent, Index count, Index index);

/// Half-open N-d range of global element indices. A scalar's box has rank 0 and volume 1.
struct Box {
  Dims lo;
  Dims hi;

  static Box whole(const Shape& shape) { return {Dims::filled(shape.size(), 0), shape}; }

  std::size_t rank() const noexcept { return lo.size(); }
  Interval operator[](std::size_t d) const noexcept { return {lo[d], hi[d]}; }
  bool empty() const noexcept;
  /// hi - lo, clamped at 0.
  Shape extents() const noexcept;
  /// Elements inside. Cannot overflow for a box inside a checked shape.
  Index volume() const noexcept;
  bool contains(const Box& other) const noexcept;

  friend auto operator<=>(const Box&, const Box&) = default;
};

std::string to_string(const Box& box);  ///< "[0:4, 2:8]"

/// The common part, or nothing. Ranks must agree.
std::optional<Box> intersect(const Box& a, const Box& b) noexcept;

/// Appends @p a without @p b to @p out, as at most 2 * rank disjoint boxes.
void subtract(const Box& a, const Box& b, std::vector<Box>& out);

/// The row-major flat range [begin, end) of a tensor of @p shape as boxes in ascending order: at
/// most 2 * rank - 1 of them, each contiguous in row-major order.
std::vector<Box> boxes_of_flat_range(const Shape& shape, Interval flat);

}  // namespace m2n
