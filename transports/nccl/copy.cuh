// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The tasks of a list on the device: a warp copies or casts a tile of one.

#include <cuda_runtime.h>

#include "transports/nccl/cast.cuh"
#include "transports/nccl/task.hpp"

namespace m2n::nccl {

constexpr int kWarp = 32;
/// Units that a lane loads before it stores the first.
constexpr int kInFlight = 4;

/// Where a row starts on both sides.
struct RowPlace {
  u64 source;
  u64 destination;
  u64 unit;  ///< In the row.
  u64 scale = 0;
};

template <bool kScaled = false>
__device__ inline RowPlace place_of(const Task& task, const Loop* __restrict__ loops, u64 unit) {
  RowPlace place{task.source, task.destination, unit, task.scales};
  if (task.loop_count == 0) {
    return place;
  }
  u64 row;
  if (((unit | task.row_units) >> 32) == 0) {
    row = static_cast<u32>(unit) / static_cast<u32>(task.row_units);
  } else {
    row = unit / task.row_units;
  }
  place.unit = unit - row * task.row_units;
  for (u32 l = 0; l + 1 < task.loop_count; ++l) {
    const Loop loop = loops[task.first_loop + l];
    const u64 next = ((row | loop.extent) >> 32) == 0
                         ? static_cast<u32>(row) / static_cast<u32>(loop.extent)
                         : row / loop.extent;
    const i64 at = static_cast<i64>(row - next * loop.extent);
    place.source += static_cast<u64>(at * loop.source_step);
    place.destination += static_cast<u64>(at * loop.destination_step);
    if constexpr (kScaled) {
      place.scale += static_cast<u64>(at * loop.scale_step);
    }
    row = next;
  }
  const Loop outer = loops[task.first_loop + task.loop_count - 1];
  place.source += static_cast<u64>(static_cast<i64>(row) * outer.source_step);
  place.destination += static_cast<u64>(static_cast<i64>(row) * outer.destination_step);
  if constexpr (kScaled) {
    place.scale += static_cast<u64>(static_cast<i64>(row) * outer.scale_step);
  }
  return place;
}

/// 16 bytes from any address, by the widest loads that its alignment allows.
__device__ inline uint4 load_segment(u64 address) {
  if ((address & 15) == 0) {
    return __ldcs(reinterpret_cast<const uint4*>(address));
  }
  uint4 value;
  if ((address & 7) == 0) {
    const auto* p = reinterpret_cast<const uint2*>(address);
    const uint2 a = __ldcs(p);
    const uint2 b = __ldcs(p + 1);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
  if ((address & 3) == 0) {
    const auto* p = reinterpret_cast<const u32*>(address);
    return make_uint4(p[0], p[1], p[2], p[3]);
  }
  u32* words = &value.x;
  if ((address & 1) == 0) {
    const auto* p = reinterpret_cast<const u16*>(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = p[2 * i] | (static_cast<u32>(p[2 * i + 1]) << 16);
    }
  } else {
    const auto* p = reinterpret_cast<const unsigned char*>(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = p[4 * i] | (static_cast<u32>(p[4 * i + 1]) << 8) |
                 (static_cast<u32>(p[4 * i + 2]) << 16) | (static_cast<u32>(p[4 * i + 3]) << 24);
    }
  }
  return value;
}

/// Bytes [0, count) one item at a time, the item as wide as both alignments and the count allow.
__device__ inline void copy_small(u64 source, u64 destination, u32 count) {
  const u64 mix = source | destination | count;
  if ((mix & 7) == 0) {
    for (u32 i = 0; i < count; i += 8) {
      *reinterpret_cast<u64*>(destination + i) = *reinterpret_cast<const u64*>(source + i);
    }
  } else if ((mix & 3) == 0) {
    for (u32 i = 0; i < count; i += 4) {
      *reinterpret_cast<u32*>(destination + i) = *reinterpret_cast<const u32*>(source + i);
    }
  } else if ((mix & 1) == 0) {
    for (u32 i = 0; i < count; i += 2) {
      *reinterpret_cast<u16*>(destination + i) = *reinterpret_cast<const u16*>(source + i);
    }
  } else {
    for (u32 i = 0; i < count; ++i) {
      *reinterpret_cast<unsigned char*>(destination + i) =
          *reinterpret_cast<const unsigned char*>(source + i);
    }
  }
}

/// Units [begin, end) of a task without a cast, by one warp.
__device__ inline void copy_units(const Task& task, const Loop* __restrict__ loops, u64 begin,
                                  u64 end, u32 lane) {
  for (u64 base = begin + lane; base < end; base += kInFlight * kWarp) {
    uint4 values[kInFlight];
    u64 targets[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      targets[k] = 0;
      const u64 unit = base + static_cast<u64>(k) * kWarp;
      if (unit >= end) {
        continue;
      }
      const RowPlace row = place_of(task, loops, unit);
      const u64 segment = (row.destination & ~15ull) + row.unit * 16;
      const u64 row_end = row.destination + task.row_bytes;
      if (segment >= row.destination && segment + 16 <= row_end) {
        targets[k] = segment;
        values[k] = load_segment(row.source + (segment - row.destination));
      } else if (segment < row_end) {
        const u64 first = max(segment, row.destination);
        const u64 last = min(segment + 16, row_end);
        copy_small(row.source + (first - row.destination), first, static_cast<u32>(last - first));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (targets[k] != 0) {
        __stcs(reinterpret_cast<uint4*>(targets[k]), values[k]);
      }
    }
  }
}

__device__ inline u32 load_item(u64 address, u32 bytes) {
  u32 bits = 0;
  for (u32 i = 0; i < bytes; ++i) {
    bits |= static_cast<u32>(*reinterpret_cast<const unsigned char*>(address + i)) << (8 * i);
  }
  return bits;
}

__device__ inline void store_item(u64 address, u32 bytes, u32 bits) {
  for (u32 i = 0; i < bytes; ++i) {
    *reinterpret_cast<unsigned char*>(address + i) = static_cast<unsigned char>(bits >> (8 * i));
  }
}

/// The two 16-bit items of a word, cast.
template <Convert kConvert>
__device__ inline u32 cast_pair(u32 low, u32 high) {
  return cast(kConvert, low) | (cast(kConvert, high) << 16);
}

/// Units [begin, end) of a task with a cast: kCastUnit elements each.
template <Convert kConvert>
__device__ inline void cast_units(const Task& task, const Loop* __restrict__ loops, u64 begin,
                                  u64 end, u32 lane) {
  constexpr bool kWideIn = kConvert == Convert::f32_to_bf16 || kConvert == Convert::f32_to_f16;
  constexpr bool kWideOut = kConvert == Convert::bf16_to_f32 || kConvert == Convert::f16_to_f32;
  constexpr u32 kIn = kWideIn ? 4 : 2;
  constexpr u32 kOut = kWideOut ? 4 : 2;
  const u64 row_elements = task.row_bytes / kOut;
  for (u64 base = begin + lane; base < end; base += kInFlight * kWarp) {
    uint4 low[kInFlight];
    uint4 high[kInFlight];
    u64 targets[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      targets[k] = 0;
      const u64 unit = base + static_cast<u64>(k) * kWarp;
      if (unit >= end) {
        continue;
      }
      const RowPlace row = place_of(task, loops, unit);
      const u64 element = row.unit * kCastUnit;
      const u64 source = row.source + element * kIn;
      const u64 target = row.destination + element * kOut;
      if (element + kCastUnit <= row_elements && ((source | target) & 15) == 0) {
        targets[k] = target;
        low[k] = __ldcs(reinterpret_cast<const uint4*>(source));
        if (kWideIn) {
          high[k] = __ldcs(reinterpret_cast<const uint4*>(source) + 1);
        }
        continue;
      }
      const u64 last = min(element + kCastUnit, row_elements);
      for (u64 e = element; e < last; ++e) {
        store_item(row.destination + e * kOut, kOut,
                   cast(kConvert, load_item(row.source + e * kIn, kIn)));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (targets[k] == 0) {
        continue;
      }
      auto* out = reinterpret_cast<uint4*>(targets[k]);
      const uint4 a = low[k];
      if constexpr (kWideIn) {
        const uint4 b = high[k];
        __stcs(out, make_uint4(cast_pair<kConvert>(a.x, a.y), cast_pair<kConvert>(a.z, a.w),
                               cast_pair<kConvert>(b.x, b.y), cast_pair<kConvert>(b.z, b.w)));
      } else if constexpr (kWideOut) {
        __stcs(out, make_uint4(cast(kConvert, a.x & 0xffffu), cast(kConvert, a.x >> 16),
                               cast(kConvert, a.y & 0xffffu), cast(kConvert, a.y >> 16)));
        __stcs(out + 1, make_uint4(cast(kConvert, a.z & 0xffffu), cast(kConvert, a.z >> 16),
                                   cast(kConvert, a.w & 0xffffu), cast(kConvert, a.w >> 16)));
      } else {
        __stcs(out, make_uint4(cast_pair<kConvert>(a.x & 0xffffu, a.x >> 16),
                               cast_pair<kConvert>(a.y & 0xffffu, a.y >> 16),
                               cast_pair<kConvert>(a.z & 0xffffu, a.z >> 16),
                               cast_pair<kConvert>(a.w & 0xffffu, a.w >> 16)));
      }
    }
  }
}

}  // namespace m2n::nccl
