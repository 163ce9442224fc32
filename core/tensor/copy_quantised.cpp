// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/copy_quantised.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/tensor/block_scales.hpp"
#include "core/tensor/blocks.hpp"

namespace m2n {
namespace {

/// The innermost loop, with its steps in bytes.
struct Line {
  Index extent = 1;
  Index source_step = 0;
  Index destination_step = 0;
  Index scale_step = 0;
};

template <std::size_t Bytes>
void move_items(const std::byte* from, Index from_step, std::byte* to, Index to_step,
                Index count) noexcept {
  for (Index i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, Bytes);
  }
}

/// A line of elements that is quantised, with its steps in bytes.
void quantise_line(DType from, const Line& line, const std::byte* source, const std::byte* scales,
                   std::byte* destination) {
  constexpr Index kBatch = 128;
  const auto item = static_cast<Index>(bytes_of(from));
  std::array<std::byte, kBatch * sizeof(float)> gathered;
  std::array<std::byte, kBatch> quantised;
  const Index batch = line.scale_step == 0 ? kBatch : 1;
  const bool contiguous = line.source_step == item && line.destination_step == 1;
  for (Index at = 0; at < line.extent;) {
    const Index count =
        line.scale_step == 0 && contiguous ? line.extent : std::min(batch, line.extent - at);
    float scale = 0;
    std::memcpy(&scale, scales + at * line.scale_step, sizeof scale);
    if (contiguous) {
      quantise_f8_e4m3(from, source + at * item, scale, destination + at,
                       static_cast<std::uint64_t>(count));
      at += count;
      continue;
    }
    const auto* from_here = source + at * line.source_step;
    if (item == 2) {
      move_items<2>(from_here, line.source_step, gathered.data(), item, count);
    } else {
      move_items<4>(from_here, line.source_step, gathered.data(), item, count);
    }
    quantise_f8_e4m3(from, gathered.data(), scale, quantised.data(),
                     static_cast<std::uint64_t>(count));
    move_items<1>(quantised.data(), 1, destination + at * line.destination_step,
                  line.destination_step, count);
    at += count;
  }
}

}  // namespace

void copy_quantised(const StridedCopy& simple, const std::byte* source, const std::byte* scales,
                    std::byte* destination) {
  const auto item = static_cast<Index>(simple.source_item_bytes());
  constexpr Index kScaleBytes = sizeof(float);
  const std::size_t rank = simple.extents.size();
  if (rank == 0) {
    quantise_line(simple.source_dtype, {1, item, 1, 0}, source, scales, destination);
    return;
  }
  const std::size_t last = rank - 1;
  const Line line{simple.extents[last], simple.source_strides[last] * item,
                  simple.destination_strides[last], simple.scale_strides[last] * kScaleBytes};
  std::array<Index, kMaxRank> index{};
  for (;;) {
    Index source_at = 0;
    Index scale_at = 0;
    Index destination_at = 0;
    for (std::size_t d = 0; d < last; ++d) {
      source_at += index[d] * simple.source_strides[d];
      scale_at += index[d] * simple.scale_strides[d];
      destination_at += index[d] * simple.destination_strides[d];
    }
    quantise_line(simple.source_dtype, line, source + source_at * item,
                  scales + scale_at * kScaleBytes, destination + destination_at);
    std::size_t d = last;
    while (d > 0 && ++index[d - 1] == simple.extents[d - 1]) {
      index[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

std::vector<QuantisedPart> quantised_parts(const Box& box, DType from, const Strides& source,
                                           const Strides& destination, const Dims& blocks,
                                           const Strides& scales) {
  const Dims origin = Dims::filled(box.rank(), 0);
  std::vector<QuantisedPart> out;
  for (const ScaledPart& part : scaled_parts(box, blocks)) {
    StridedCopy copy{part.extents, {}, {}, from, DType::f8_e4m3, {}};
    for (std::size_t d = 0; d < part.extents.size(); ++d) {
      const auto dim = static_cast<std::size_t>(part.dims[d]);
      copy.source_strides.push_back(part.steps[d] * source[dim]);
      copy.destination_strides.push_back(part.steps[d] * destination[dim]);
      copy.scale_strides.push_back(part.scale_steps[d] * scales[dim]);
    }
    out.push_back({simplify(copy), element_offset(origin, part.offset, source),
                   element_offset(origin, part.offset, destination),
                   element_offset(origin, part.scale_offset, scales)});
  }
  return out;
}

}  // namespace m2n
