// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/block_scales.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/cast.hpp"

namespace m2n {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffff;
constexpr std::uint32_t kInfinity = 0x7f800000;
constexpr float kLargestF8 = 448;
constexpr auto kLargestBits = std::bit_cast<std::uint32_t>(kLargestF8);

/// As in cast.cpp: a choice that stays one, so that loops vectorise.
inline std::uint32_t choose_bits(bool first, std::uint32_t a, std::uint32_t b) noexcept {
  const std::uint32_t mask = 0U - std::uint32_t{first};
  return (a & mask) | (b & ~mask);
}

/// As for f16 in cast.cpp: a power of two whose own step is that of the result there is added, and
/// what is left in the low bits is the rounded significand, leading bit included.
inline std::uint8_t rounded_f8(std::uint32_t f32) noexcept {
  constexpr std::uint32_t kSmallestNormal = 121U << 23;  // 2^-6
  constexpr std::uint32_t kUp = 20U << 23;               // 23 bits of f32 less 3 of f8_e4m3
  const std::uint32_t magnitude = f32 & kMagnitude;
  const std::uint32_t kept = choose_bits(magnitude > kLargestBits, kLargestBits, magnitude);
  const std::uint32_t power = std::max(kept & kInfinity, kSmallestNormal) + kUp;
  const auto sum =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(kept) + std::bit_cast<float>(power));
  const std::uint32_t size = ((power >> 23) - 141U) * 8U + (sum & 0x1fU);
  return static_cast<std::uint8_t>(
      choose_bits(magnitude > kInfinity, 0x7fU, (f32 >> 24 & 0x80U) | size));
}

void quantise_floats(const float* __restrict values, float scale, std::byte* __restrict destination,
                     std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    destination[i] = std::byte{rounded_f8(std::bit_cast<std::uint32_t>(values[i] / scale))};
  }
}

/// The largest magnitude among the bits of @p count elements. NaN is above infinity.
template <class Bits>
std::uint32_t largest_bits(const std::byte* data, Index stride, Index count) noexcept {
  constexpr auto kMask = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  const auto at = [&](Index i) {
    Bits bits;
    std::memcpy(&bits, data + i * static_cast<Index>(sizeof(Bits)), sizeof bits);
    return static_cast<Bits>(bits & kMask);
  };
  Bits largest = 0;
  if (stride == 1) {
    for (Index i = 0; i < count; ++i) {
      largest = std::max(largest, at(i));
    }
  } else {
    for (Index i = 0; i < count; ++i) {
      largest = std::max(largest, at(i * stride));
    }
  }
  return largest;
}

float value_of(DType dtype, std::uint32_t bits) noexcept {
  switch (dtype) {
    case DType::bf16:
      return f32_from_bf16(static_cast<std::uint16_t>(bits));
    case DType::f16:
      return f32_from_f16(static_cast<std::uint16_t>(bits));
    default:
      return std::bit_cast<float>(bits);
  }
}

void require_float(DType dtype) {
  if (!can_quantise(dtype, DType::f8_e4m3)) {
    throw Error(Errc::bad_argument, "no quantisation from " + std::string(to_string(dtype)) +
                                        " to f8_e4m3, expected f32, bf16 or f16");
  }
}

/// Calls @p visit(index) for every index of [0, extents), row-major.
template <class Visit>
void for_each_index(const Shape& extents, const Visit& visit) {
  Dims at = Dims::filled(extents.size(), 0);
  for (;;) {
    visit(at);
    std::size_t d = extents.size();
    while (d > 0 && ++at[d - 1] == extents[d - 1]) {
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

/// Of a block, along the dimension in which its elements lie nearest to one another.
float largest_of(const Shape& extents, DType dtype, const std::byte* data, const Strides& strides) {
  std::size_t line = extents.size();
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] > 1 &&
        (line == extents.size() || std::abs(strides[d]) < std::abs(strides[line]))) {
      line = d;
    }
  }
  Shape lines = extents;
  Index count = 1;
  Index stride = 1;
  if (line < extents.size()) {
    count = extents[line];
    stride = strides[line];
    lines[line] = 1;
  }
  const Dims origin = Dims::filled(extents.size(), 0);
  const auto item = static_cast<Index>(bytes_of(dtype));
  std::uint32_t largest = 0;
  for_each_index(lines, [&](const Dims& at) {
    const std::byte* const first = data + element_offset(origin, at, strides) * item;
    largest = std::max(largest, item == 2 ? largest_bits<std::uint16_t>(first, stride, count)
                                          : largest_bits<std::uint32_t>(first, stride, count));
  });
  return value_of(dtype, largest);
}

/// Where a box of one dimension meets blocks: a stretch of whole blocks, or a part of one.
struct Stretch {
  Index begin = 0;
  Index blocks = 0;  ///< Whole ones; 0 for a part of one.
  Index size = 0;    ///< Elements of a block, or of the part.
};

std::vector<Stretch> stretches_of(Interval range, Index block) {
  std::vector<Stretch> out;
  const Index first = std::min(range.end, ceil_div(range.begin, block) * block);
  const Index last = std::max(first, range.end / block * block);
  if (range.begin < first) {
    out.push_back({range.begin, 0, first - range.begin});
  }
  if (first < last) {
    out.push_back({first, (last - first) / block, block});
  }
  if (last < range.end) {
    out.push_back({last, 0, range.end - last});
  }
  return out;
}

}  // namespace

float block_scale(float largest) noexcept {
  const float scale = largest / kLargestF8;
  if (std::isnan(scale)) {
    return std::bit_cast<float>(0x7fc00000U);
  }
  return scale == 0 ? 1.0F : scale;
}

void quantise_f8_e4m3(DType from, const std::byte* source, float scale, std::byte* destination,
                      std::uint64_t count) {
  require_float(from);
  constexpr std::uint64_t kBatch = 256;
  std::array<float, kBatch> values;
  const std::uint64_t item = bytes_of(from);
  for (std::uint64_t at = 0; at < count; at += kBatch) {
    const std::uint64_t some = std::min(kBatch, count - at);
    cast_elements(from, source + at * item, DType::f32, reinterpret_cast<std::byte*>(values.data()),
                  some);
    quantise_floats(values.data(), scale, destination + at, some);
  }
}

Shape scale_shape(const Shape& shape, const Dims& blocks) {
  expects(shape.size() == blocks.size(), "a block extent for each dimension");
  Shape out;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    out.push_back(ceil_div(shape[d], blocks[d]));
  }
  return out;
}

Box scale_box(const Box& box, const Dims& blocks) {
  Box out;
  for (std::size_t d = 0; d < box.rank(); ++d) {
    out.lo.push_back(box.lo[d] / blocks[d]);
    out.hi.push_back(ceil_div(box.hi[d], blocks[d]));
  }
  return out;
}

bool holds_whole_blocks(const Box& box, const Shape& shape, const Dims& blocks) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    if (box.lo[d] % blocks[d] != 0 || (box.hi[d] % blocks[d] != 0 && box.hi[d] != shape[d])) {
      return false;
    }
  }
  return true;
}

void block_scales(const Box& box, const Dims& blocks, DType dtype, const std::byte* data,
                  const Strides& strides, std::byte* scales, const Strides& scale_strides) {
  require_float(dtype);
  if (box.empty()) {
    return;
  }
  const Box held = scale_box(box, blocks);
  const auto item = static_cast<Index>(bytes_of(dtype));
  const Dims origin = Dims::filled(box.rank(), 0);
  for_each_index(held.extents(), [&](const Dims& at) {
    Dims first;
    Shape extents;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      first.push_back(at[d] * blocks[d]);
      extents.push_back(std::min(blocks[d], box.hi[d] - box.lo[d] - first[d]));
    }
    const float scale = block_scale(
        largest_of(extents, dtype, data + element_offset(origin, first, strides) * item, strides));
    std::memcpy(scales + element_offset(origin, at, scale_strides) * Index{sizeof scale}, &scale,
                sizeof scale);
  });
}

std::vector<ScaledPart> scaled_parts(const Box& box, const Dims& blocks) {
  std::vector<ScaledPart> parts;
  if (box.empty()) {
    return parts;
  }
  parts.emplace_back();
  for (std::size_t d = 0; d < box.rank(); ++d) {
    const auto dim = static_cast<Index>(d);
    std::vector<ScaledPart> next;
    for (const ScaledPart& part : parts) {
      for (const Stretch& stretch : stretches_of(box[d], blocks[d])) {
        ScaledPart& made = next.emplace_back(part);
        made.offset.push_back(stretch.begin - box.lo[d]);
        made.scale_offset.push_back(stretch.begin / blocks[d]);
        if (stretch.blocks > 0) {
          made.extents.push_back(stretch.blocks);
          made.steps.push_back(blocks[d]);
          made.scale_steps.push_back(1);
          made.dims.push_back(dim);
        }
        if (stretch.blocks == 0 || blocks[d] > 1) {
          made.extents.push_back(stretch.size);
          made.steps.push_back(1);
          made.scale_steps.push_back(0);
          made.dims.push_back(dim);
        }
      }
    }
    parts = std::move(next);
  }
  return parts;
}

}  // namespace m2n
