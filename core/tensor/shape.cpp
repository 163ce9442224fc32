// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/shape.hpp"

#include <limits>

#include "core/error.hpp"

namespace m2n {
namespace {

template <class T>
[[noreturn]] void throw_overflow(T a, const char* sign, T b, const char* what) {
  throw Error(Errc::bad_argument, std::string(what) + " " + std::to_string(a) + sign +
                                      std::to_string(b) + " does not fit, expected at most " +
                                      std::to_string(std::numeric_limits<T>::max()));
}

template <class T>
T mul(T a, T b, const char* what) {
  T product{};
  if (__builtin_mul_overflow(a, b, &product)) [[unlikely]] {
    throw_overflow(a, " * ", b, what);
  }
  return product;
}

template <class T>
T add(T a, T b, const char* what) {
  T sum{};
  if (__builtin_add_overflow(a, b, &sum)) [[unlikely]] {
    throw_overflow(a, " + ", b, what);
  }
  return sum;
}

[[noreturn]] void throw_rank() {
  throw Error(Errc::bad_argument, "more than " + std::to_string(kMaxRank) +
                                      " dimensions, expected at most " + std::to_string(kMaxRank));
}

void expect_not_negative(const Shape& shape) {
  for (const Index extent : shape) {
    if (extent < 0) {
      throw Error(Errc::bad_argument, "shape " + to_string(shape) + " has the negative extent " +
                                          std::to_string(extent) + ", expected 0 or more");
    }
  }
}

}  // namespace

Dims::Dims(std::initializer_list<Index> values) : Dims(std::span(values.begin(), values.size())) {}

Dims::Dims(std::span<const Index> values) : size_(values.size()) {
  if (values.size() > kMaxRank) {
    throw Error(Errc::bad_argument, std::to_string(values.size()) +
                                        " dimensions, expected at most " +
                                        std::to_string(kMaxRank));
  }
  std::copy(values.begin(), values.end(), values_.begin());
}

Dims Dims::filled(std::size_t rank, Index value) {
  if (rank > kMaxRank) {
    throw_rank();
  }
  Dims dims;
  dims.size_ = rank;
  std::fill(dims.begin(), dims.end(), value);
  return dims;
}

void Dims::push_back(Index value) {
  if (size_ == kMaxRank) {
    throw_rank();
  }
  values_[size_++] = value;
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (std::size_t d = 0; d < dims.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(dims[d]);
  }
  return text + "]";
}

Index checked_mul(Index a, Index b, const char* what) { return mul(a, b, what); }

Index checked_add(Index a, Index b, const char* what) { return add(a, b, what); }

std::uint64_t checked_mul_bytes(std::uint64_t a, std::uint64_t b, const char* what) {
  return mul(a, b, what);
}

std::uint64_t checked_add_bytes(std::uint64_t a, std::uint64_t b, const char* what) {
  return add(a, b, what);
}

Index element_count(const Shape& shape) {
  expect_not_negative(shape);
  if (std::find(shape.begin(), shape.end(), Index{0}) != shape.end()) {
    return 0;
  }
  Index count = 1;
  for (const Index extent : shape) {
    count = checked_mul(count, extent);
  }
  return count;
}

Strides row_major(const Shape& shape) {
  expect_not_negative(shape);
  Strides strides = Dims::filled(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] = checked_mul(strides[d], std::max<Index>(shape[d], 1), "stride");
  }
  return strides;
}

Interval chunk(Index extent, Index count, Index index) {
  expects(extent >= 0 && count > 0 && index >= 0 && index < count,
          "an extent of 0 or more and a part in [0, count)");
  const Index size = ceil_div(extent, count);
  if (size == 0 || index >= ceil_div(extent, size)) {
    return {extent, extent};
  }
  const Index begin = index * size;
  return {begin, begin + std::min(size, extent - begin)};
}

Interval balanced_part(Index extent, Index count, Index index) {
  expects(extent >= 0 && count > 0 && index >= 0 && index < count,
          "an extent of 0 or more and a part in [0, count)");
  const Index base = extent / count;
  const Index remainder = extent % count;
  const Index begin = index * base + std::min(index, remainder);
  return {begin, begin + base + (index < remainder ? 1 : 0)};
}

bool Box::empty() const noexcept {
  for (std::size_t d = 0; d < rank(); ++d) {
    if (hi[d] <= lo[d]) {
      return true;
    }
  }
  return false;
}

Shape Box::extents() const noexcept {
  Shape extents = hi;
  for (std::size_t d = 0; d < rank(); ++d) {
    extents[d] = (*this)[d].size();
  }
  return extents;
}

Index Box::volume() const noexcept {
  if (empty()) {
    return 0;
  }
  Index volume = 1;
  for (std::size_t d = 0; d < rank(); ++d) {
    volume *= hi[d] - lo[d];
  }
  return volume;
}

bool Box::contains(const Box& other) const noexcept {
  if (other.rank() != rank()) {
    return false;
  }
  for (std::size_t d = 0; d < rank(); ++d) {
    if (other.lo[d] < lo[d] || other.lo[d] > hi[d] || other.hi[d] > hi[d]) {
      return false;
    }
  }
  return true;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (std::size_t d = 0; d < box.rank(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(box.lo[d]) + ":" + std::to_string(box.hi[d]);
  }
  return text + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) noexcept {
  Box common = a;
  for (std::size_t d = 0; d < a.rank(); ++d) {
    common.lo[d] = std::max(a.lo[d], b.lo[d]);
    common.hi[d] = std::min(a.hi[d], b.hi[d]);
    if (common.hi[d] <= common.lo[d]) {
      return std::nullopt;
    }
  }
  return common;
}

void subtract(const Box& a, const Box& b, std::vector<Box>& out) {
  if (a.empty()) {
    return;
  }
  const std::optional<Box> common = intersect(a, b);
  if (!common) {
    out.push_back(a);
    return;
  }
  Box rest = a;  // shrinks to the common part, one dimension after the other
  for (std::size_t d = 0; d < a.rank(); ++d) {
    if (rest.lo[d] < common->lo[d]) {
      out.push_back(rest);
      out.back().hi[d] = common->lo[d];
    }
    if (common->hi[d] < rest.hi[d]) {
      out.push_back(rest);
      out.back().lo[d] = common->hi[d];
    }
    rest.lo[d] = common->lo[d];
    rest.hi[d] = common->hi[d];
  }
}

std::vector<Box> boxes_of_flat_range(const Shape& shape, Interval flat) {
  const Index count = element_count(shape);
  if (flat.begin < 0 || flat.begin > flat.end || flat.end > count) {
    throw Error(Errc::bad_argument, "flat range [" + std::to_string(flat.begin) + ", " +
                                        std::to_string(flat.end) + ") of shape " +
                                        to_string(shape) + ", expected a part of [0, " +
                                        std::to_string(count) + ")");
  }
  std::vector<Box> boxes;
  if (flat.empty()) {
    return boxes;
  }
  if (shape.empty()) {
    return {Box{}};
  }
  // Greedy: at each position the outermost dimension that starts there and whose step fits, as many
  // steps as fit before that dimension wraps. The steps grow to the dimension in which begin and
  // end part, then shrink: at most one box a dimension each way, and that dimension has only one.
  const Strides strides = row_major(shape);
  for (Index at = flat.begin; at < flat.end;) {
    const Index left = flat.end - at;
    std::size_t d = 0;
    while (at % strides[d] != 0 || strides[d] > left) {
      ++d;  // ends: the last stride is 1
    }
    Box box;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const Index index = at / strides[i] % shape[i];
      box.lo.push_back(index);
      box.hi.push_back(i < d ? index + 1 : shape[i]);
    }
    const Index steps = std::min(left / strides[d], shape[d] - box.lo[d]);
    box.hi[d] = box.lo[d] + steps;
    boxes.push_back(box);
    at += steps * strides[d];
  }
  return boxes;
}

}  // namespace m2n
