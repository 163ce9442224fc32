// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Random strided copies, for the tables on the host and the kernel on the device.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/tensor/copy.hpp"

namespace m2n::testing {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count);
  for (std::byte& b : bytes) {
    b = static_cast<std::byte>(random());
  }
  return bytes;
}

/// A random view of up to four dimensions in a buffer, with gaps, transposed.
struct RandomCopy {
  StridedCopy copy;
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;
  std::uint64_t source_bytes = 0;
  std::uint64_t destination_bytes = 0;
  Bytes scales;  ///< Of a copy that quantises; any offset.
  std::uint64_t scale_offset = 0;
  const std::byte* first_scale() const { return scales.data() + scale_offset; }
};

inline Strides random_strides(const Shape& extents, std::mt19937_64& random, Index& elements) {
  std::vector<std::size_t> order(extents.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  Strides strides = Dims::filled(extents.size(), 0);
  Index step = random() % 3 == 0 ? 2 : 1;
  for (const std::size_t d : order) {
    strides[d] = step;
    step = step * extents[d] + static_cast<Index>(random() % 3);
  }
  elements = step + 1;
  return strides;
}

/// Positive scales, with dimensions that have but one.
inline void add_scales(RandomCopy& out, std::mt19937_64& random) {
  Index elements = 0;
  out.copy.scale_strides = random_strides(out.copy.extents, random, elements);
  for (Index& stride : out.copy.scale_strides) {
    stride = random() % 2 == 0 ? 0 : stride;
  }
  out.scale_offset = random() % 40;
  out.scales.resize(out.scale_offset + static_cast<std::uint64_t>(elements + 1) * sizeof(float));
  for (Index i = 0; i <= elements; ++i) {
    const float scale = static_cast<float>(1 + random() % 1'000'000) * 0x1p-16F;
    std::memcpy(out.scales.data() + out.scale_offset + static_cast<std::uint64_t>(i) * sizeof scale,
                &scale, sizeof scale);
  }
}

inline RandomCopy random_copy(std::mt19937_64& random, DType from, DType to, Index limit) {
  RandomCopy out;
  const std::size_t rank = random() % 5;
  for (std::size_t d = 0; d < rank; ++d) {
    out.copy.extents.push_back(1 +
                               static_cast<Index>(random() % static_cast<std::uint64_t>(limit)));
  }
  out.copy.source_dtype = from;
  out.copy.destination_dtype = to;
  Index source = 0;
  Index destination = 0;
  out.copy.source_strides = random_strides(out.copy.extents, random, source);
  out.copy.destination_strides = random_strides(out.copy.extents, random, destination);
  if (random() % 2 == 0) {  // often plain rows
    out.copy.source_strides = row_major(out.copy.extents);
    source = element_count(out.copy.extents);
  }
  if (random() % 2 == 0) {
    out.copy.destination_strides = row_major(out.copy.extents);
    destination = element_count(out.copy.extents);
  }
  out.source_offset = random() % 40;
  out.destination_offset = random() % 40;
  out.source_bytes = out.source_offset + static_cast<std::uint64_t>(source + 1) * bytes_of(from);
  out.destination_bytes =
      out.destination_offset + static_cast<std::uint64_t>(destination + 1) * bytes_of(to);
  if (out.copy.quantises()) {
    add_scales(out, random);
  }
  out.copy = simplify(out.copy);
  return out;
}

inline const std::vector<std::pair<DType, DType>> kCopyTypes = {
    {DType::u8, DType::u8},    {DType::bf16, DType::bf16}, {DType::f32, DType::f32},
    {DType::i64, DType::i64},  {DType::f32, DType::bf16},  {DType::f32, DType::f16},
    {DType::bf16, DType::f32}, {DType::f16, DType::bf16},  {DType::bf16, DType::f16},
    {DType::f16, DType::f32}};

inline const std::vector<std::pair<DType, DType>> kQuantisedTypes = {
    {DType::f32, DType::f8_e4m3}, {DType::bf16, DType::f8_e4m3}, {DType::f16, DType::f8_e4m3}};

}  // namespace m2n::testing
