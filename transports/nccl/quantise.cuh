// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The tasks of a list that quantise, on the device.

#include "transports/nccl/copy.cuh"

namespace m2n::nccl {

/// Four elements under a plain scale.
__device__ inline u32 quantise_four(float a, float b, float c, float d, float scale,
                                    float inverse) {
  return f8_pair(divide(a, scale, inverse), divide(b, scale, inverse)) |
         f8_pair(divide(c, scale, inverse), divide(d, scale, inverse)) << 16;
}

/// Four elements of two words.
template <Convert kConvert>
__device__ inline u32 quantise_words(u32 first, u32 second, float scale, float inverse) {
  if constexpr (kConvert == Convert::bf16_to_f8) {
    return quantise_four(__uint_as_float(first << 16), __uint_as_float(first & 0xffff0000u),
                         __uint_as_float(second << 16), __uint_as_float(second & 0xffff0000u),
                         scale, inverse);
  } else {
    return quantise_four(value_of(kConvert, first & 0xffffu), value_of(kConvert, first >> 16),
                         value_of(kConvert, second & 0xffffu), value_of(kConvert, second >> 16),
                         scale, inverse);
  }
}

/// kQuantiseUnit elements, of as many segments as they take.
template <Convert kConvert>
__device__ inline uint4 quantise_unit(const uint4* segments, float scale) {
  const float inverse = __frcp_rn(scale);
  if constexpr (kConvert == Convert::f32_to_f8) {
    const auto four = [&](const uint4& s) {
      return quantise_four(__uint_as_float(s.x), __uint_as_float(s.y), __uint_as_float(s.z),
                           __uint_as_float(s.w), scale, inverse);
    };
    return make_uint4(four(segments[0]), four(segments[1]), four(segments[2]), four(segments[3]));
  } else {
    const auto four = [&](u32 a, u32 b) { return quantise_words<kConvert>(a, b, scale, inverse); };
    const uint4 low = segments[0];
    const uint4 high = segments[1];
    return make_uint4(four(low.x, low.y), four(low.z, low.w), four(high.x, high.y),
                      four(high.z, high.w));
  }
}

/// One by one: a unit at the end of a row, at an odd address, or under a scale of an unusual size.
template <Convert kConvert>
__device__ inline void quantise_slowly(const Task& task, const RowPlace& row) {
  constexpr u32 kIn = kConvert == Convert::f32_to_f8 ? 4 : 2;
  const u64 element = row.unit * kQuantiseUnit;
  const u64 last = min(element + kQuantiseUnit, task.row_bytes);
  const float scale = __uint_as_float(load_item(row.scale, sizeof(float)));
#pragma unroll 1
  for (u64 e = element; e < last; ++e) {
    store_item(row.destination + e, 1,
               quantise(kConvert, load_item(row.source + e * kIn, kIn), scale));
  }
}

/// Units [begin, end) of a task that quantises: kQuantiseUnit elements each, under one scale.
template <Convert kConvert>
__device__ inline void quantise_units(const Task& task, const Loop* __restrict__ loops, u64 begin,
                                      u64 end, u32 lane) {
  constexpr u32 kIn = kConvert == Convert::f32_to_f8 ? 4 : 2;
  constexpr int kSegments = kQuantiseUnit * kIn / 16;
  constexpr int kUnits = 4 / kSegments;  // in flight; more spill registers
  for (u64 base = begin + lane; base < end; base += kUnits * kWarp) {
    uint4 segments[kUnits][kSegments];
    float scales[kUnits];
    u64 targets[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      targets[k] = 0;
      const u64 unit = base + static_cast<u64>(k) * kWarp;
      if (unit >= end) {
        continue;
      }
      const RowPlace row = place_of<true>(task, loops, unit);
      const u64 element = row.unit * kQuantiseUnit;
      const u64 source = row.source + element * kIn;
      const u64 target = row.destination + element;
      if (element + kQuantiseUnit <= task.row_bytes && (source & 15) == 0 && (target & 7) == 0 &&
          (row.scale & 3) == 0) {
        targets[k] = target;
        scales[k] = *reinterpret_cast<const float*>(row.scale);
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          segments[k][i] = __ldcs(reinterpret_cast<const uint4*>(source) + i);
        }
      } else {
        quantise_slowly<kConvert>(task, row);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (targets[k] == 0) {
        continue;
      }
      if (!is_plain(scales[k])) {
        const u64 unit = base + static_cast<u64>(k) * kWarp;
        quantise_slowly<kConvert>(task, place_of<true>(task, loops, unit));
        continue;
      }
      const uint4 out = quantise_unit<kConvert>(segments[k], scales[k]);
      if ((targets[k] & 15) == 0) {
        __stcs(reinterpret_cast<uint4*>(targets[k]), out);
      } else {
        __stcs(reinterpret_cast<uint2*>(targets[k]), make_uint2(out.x, out.y));
        __stcs(reinterpret_cast<uint2*>(targets[k]) + 1, make_uint2(out.z, out.w));
      }
    }
  }
}

}  // namespace m2n::nccl
