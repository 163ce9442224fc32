// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/kernels.hpp"

#include <algorithm>

namespace m2n::nccl {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

constexpr int kWarp = 32;
constexpr int kListThreads = 512;
/// Units that a lane loads before it stores the first.
constexpr int kInFlight = 4;
constexpr u32 kSpinsPerAbortCheck = 64;

__device__ u64 load_acquire(const volatile u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_release(u64 address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// ------------------------------------------------------------------------------------- casts
// Word for word the rules of core/tensor/cast.cpp.

__device__ u32 choose(bool first, u32 a, u32 b) { return first ? a : b; }

__device__ u32 bf16_of_f32(u32 f32) {
  const u32 rounded = (f32 + 0x7fffu + ((f32 >> 16) & 1u)) >> 16;
  const u32 quieted = (f32 >> 16) | 0x40u;
  return (f32 & 0x7fffffffu) > 0x7f800000u ? quieted : rounded;
}

__device__ u32 f32_of_bf16(u32 bf16) {
  const u32 f32 = bf16 << 16;
  return f32 | ((f32 & 0x7fffffffu) > 0x7f800000u ? 0x400000u : 0u);
}

__device__ u32 f16_of_f32(u32 f32) {
  const u32 sign = (f32 >> 16) & 0x8000u;
  const u32 magnitude = f32 & 0x7fffffffu;
  const float scaled = __fmul_rn(__fmul_rn(__uint_as_float(magnitude), 0x1p112f), 0x1p-110f);
  const u32 power = max(magnitude & 0x7f800000u, 113u << 23) + (15u << 23);
  const u32 sum = __float_as_uint(__fadd_rn(scaled, __uint_as_float(power)));
  const u32 rounded = ((sum >> 13) & 0x7c00u) + (sum & 0xfffu);
  const u32 quieted = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  return (sign | choose(magnitude > 0x7f800000u, quieted, rounded)) & 0xffffu;
}

__device__ u32 f32_of_f16(u32 f16) {
  const u32 sign = (f16 & 0x8000u) << 16;
  const u32 magnitude = f16 & 0x7fffu;
  const u32 normal = (magnitude << 13) + (112u << 23);
  const u32 subnormal = __float_as_uint(
      __fsub_rn(__uint_as_float((magnitude << 13) | (113u << 23)), __uint_as_float(113u << 23)));
  const u32 special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  const u32 finite = choose(magnitude < 0x400u, subnormal, normal);
  return sign | choose(magnitude >= 0x7c00u, special, finite);
}

__device__ u32 cast(Convert convert, u32 bits) {
  switch (convert) {
    case Convert::f32_to_bf16:
      return bf16_of_f32(bits);
    case Convert::f32_to_f16:
      return f16_of_f32(bits);
    case Convert::bf16_to_f32:
      return f32_of_bf16(bits);
    case Convert::bf16_to_f16:
      return f16_of_f32(f32_of_bf16(bits));
    case Convert::f16_to_f32:
      return f32_of_f16(bits);
    case Convert::f16_to_bf16:
      return bf16_of_f32(f32_of_f16(bits));
    case Convert::none:
      break;
  }
  return bits;
}

// ------------------------------------------------------------------------------------- lists

/// Where a row starts on both sides.
struct RowPlace {
  u64 source;
  u64 destination;
  u64 unit;  ///< In the row.
};

__device__ RowPlace place_of(const Task& task, const Loop* __restrict__ loops, u64 unit) {
  RowPlace place{task.source, task.destination, unit};
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
    row = next;
  }
  const Loop outer = loops[task.first_loop + task.loop_count - 1];
  place.source += static_cast<u64>(static_cast<i64>(row) * outer.source_step);
  place.destination += static_cast<u64>(static_cast<i64>(row) * outer.destination_step);
  return place;
}

/// 16 bytes from any address, by the widest loads that its alignment allows.
__device__ uint4 load_segment(u64 address) {
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
__device__ void copy_small(u64 source, u64 destination, u32 count) {
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
__device__ void copy_units(const Task& task, const Loop* __restrict__ loops, u64 begin, u64 end,
                           u32 lane) {
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

__device__ u32 load_item(u64 address, u32 bytes) {
  u32 bits = 0;
  for (u32 i = 0; i < bytes; ++i) {
    bits |= static_cast<u32>(*reinterpret_cast<const unsigned char*>(address + i)) << (8 * i);
  }
  return bits;
}

__device__ void store_item(u64 address, u32 bytes, u32 bits) {
  for (u32 i = 0; i < bytes; ++i) {
    *reinterpret_cast<unsigned char*>(address + i) = static_cast<unsigned char>(bits >> (8 * i));
  }
}

/// The two 16-bit items of a word, cast.
template <Convert kConvert>
__device__ u32 cast_pair(u32 low, u32 high) {
  return cast(kConvert, low) | (cast(kConvert, high) << 16);
}

/// Units [begin, end) of a task with a cast: kCastUnit elements each.
template <Convert kConvert>
__device__ void cast_units(const Task& task, const Loop* __restrict__ loops, u64 begin, u64 end,
                           u32 lane) {
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

/// The task of @p tile, at or after task @p at. All lanes of a warp together.
__device__ u64 find_task(const Task* __restrict__ tasks, u64 count, u64 at, u64 tile, u32 lane) {
  if (at + 1 >= count || tasks[at + 1].first_tile > tile) {
    return at;
  }
  u64 low = at + 1;
  u64 high = count;
  while (high - low > 1) {
    const u64 step = (high - low + kWarp - 1) / kWarp;
    const u64 probe = low + lane * step;
    const u32 before = __ballot_sync(~0u, probe < high && tasks[probe].first_tile <= tile);
    low += static_cast<u64>(31 - __clz(static_cast<int>(before))) * step;
    high = min(low + step, high);
  }
  return low;
}

// ------------------------------------------------------------------------------------- signals

__device__ void send_signals(const Control& control, const SignalSlice& signals, u64 round) {
  __threadfence_system();
  for (u32 i = threadIdx.x; i < signals.count; i += blockDim.x) {
    store_release(signals.signals[i].address, round * control.stride + signals.signals[i].add);
  }
}

__device__ bool is_given_up(const Control& control) {
  return *reinterpret_cast<volatile u64*>(&control.host->abort) != 0 ||
         load_acquire(&control.head->abort) != 0;
}

/// By a whole block. True when the work may begin.
__device__ bool enter(const Control& control, const Entry& entry) {
  bool failed = *reinterpret_cast<volatile u64*>(&control.head->failed) != 0;
  const u64 round = control.head->round;
  if (blockIdx.x == 0 && entry.ready.count > 0 && !failed) {
    send_signals(control, entry.ready, round);
  }
  for (u32 i = threadIdx.x; i < entry.gate_count && !failed; i += blockDim.x) {
    const u64 wanted = round * control.stride + entry.gates[i].add;
    u32 spins = 0;
    while (load_acquire(control.flags + entry.gates[i].flag) < wanted) {
      if (++spins % kSpinsPerAbortCheck == 0 && is_given_up(control)) {
        failed = true;
        break;
      }
      __nanosleep(40);
    }
  }
  failed = __syncthreads_or(failed) != 0;
  if (threadIdx.x == 0 && failed) {
    control.head->failed = 1;
    *reinterpret_cast<volatile u64*>(&control.host->failed) = 1;
    __threadfence_system();
  } else if (threadIdx.x == 0 && blockIdx.x == 0 && entry.opened != 0) {
    *reinterpret_cast<volatile u64*>(&control.host->opened) = round * control.stride + entry.opened;
    __threadfence_system();
  }
  return !failed;
}

/// By one whole block, after all work.
__device__ void leave(const Control& control, const Exit& exit) {
  const u64 round = control.head->round;
  send_signals(control, exit.signals, round);
  __syncthreads();
  if (exit.last && threadIdx.x == 0) {
    control.head->round = round + 1;
    __threadfence_system();
    *reinterpret_cast<volatile u64*>(&control.host->finished) = round;
  }
}

__global__ void gate_kernel(Control control, Entry entry, Exit exit) {
  if (enter(control, entry)) {
    leave(control, exit);
  }
}

__global__ void __launch_bounds__(kListThreads)
    list_kernel(Control control, DeviceTables tables, ListSlice list, Entry entry, Exit exit) {
  if (!enter(control, entry)) {
    return;
  }
  const Task* tasks = tables.tasks + list.begin;
  const u32 lane = threadIdx.x % kWarp;
  const u64 warps = static_cast<u64>(gridDim.x) * (kListThreads / kWarp);
  // A block's warps take neighbouring tiles, which is fastest; those of a short list are spread, so
  // that it uses all processors.
  constexpr u32 kWarpsPerBlock = kListThreads / kWarp;
  const u32 own = threadIdx.x / kWarp;
  const u64 warp = list.tiles >= 4 * warps ? static_cast<u64>(blockIdx.x) * kWarpsPerBlock + own
                                           : static_cast<u64>(own) * gridDim.x + blockIdx.x;
  u64 at = 0;
  for (u64 tile = warp; tile < list.tiles; tile += warps) {
    at = find_task(tasks, list.count, at, tile, lane);
    const Task task = tasks[at];
    const u64 begin = (tile - task.first_tile) * kTileUnits;
    const u64 end = min(begin + kTileUnits, task.rows * task.row_units);
    switch (task.convert) {
      case Convert::none:
        copy_units(task, tables.loops, begin, end, lane);
        break;
      case Convert::f32_to_bf16:
        cast_units<Convert::f32_to_bf16>(task, tables.loops, begin, end, lane);
        break;
      case Convert::f32_to_f16:
        cast_units<Convert::f32_to_f16>(task, tables.loops, begin, end, lane);
        break;
      case Convert::bf16_to_f32:
        cast_units<Convert::bf16_to_f32>(task, tables.loops, begin, end, lane);
        break;
      case Convert::bf16_to_f16:
        cast_units<Convert::bf16_to_f16>(task, tables.loops, begin, end, lane);
        break;
      case Convert::f16_to_f32:
        cast_units<Convert::f16_to_f32>(task, tables.loops, begin, end, lane);
        break;
      case Convert::f16_to_bf16:
        cast_units<Convert::f16_to_bf16>(task, tables.loops, begin, end, lane);
        break;
    }
  }
  if (exit.signals.count == 0 && !exit.last) {
    return;
  }
  __shared__ bool is_last_block;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last_block = atomicAdd(reinterpret_cast<unsigned long long*>(&control.head->arrived),
                              1ull) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last_block) {
    if (threadIdx.x == 0) {
      control.head->arrived = 0;
    }
    leave(control, exit);
  }
}

__global__ void abort_kernel(const u64* const* words, u32 count) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    store_release(reinterpret_cast<u64>(words[i]), 1);
  }
}

// ------------------------------------------------------------------------------------- values

struct ElementPlace {
  u64 index;
  i64 offset;
};

__device__ ElementPlace element_of(const BoxView& box, u64 k) {
  ElementPlace place{box.first_index, 0};
  for (int d = box.rank; d-- > 0;) {
    const u64 next = k / box.extents[d];
    const u64 at = k - next * box.extents[d];
    place.index += at * box.index_steps[d];
    place.offset += static_cast<i64>(at) * box.byte_steps[d];
    k = next;
  }
  return place;
}

template <class Word>
__device__ Word load_word(const unsigned char* at) {
  if (reinterpret_cast<u64>(at) % sizeof(Word) == 0) {
    return *reinterpret_cast<const Word*>(at);
  }
  u64 bits = 0;
  for (u32 i = 0; i < sizeof(Word); ++i) {
    bits |= static_cast<u64>(at[i]) << (8 * i);
  }
  return static_cast<Word>(bits);
}

template <class Word>
__device__ void store_word(unsigned char* at, Word bits) {
  if (reinterpret_cast<u64>(at) % sizeof(Word) == 0) {
    *reinterpret_cast<Word*>(at) = bits;
    return;
  }
  for (u32 i = 0; i < sizeof(Word); ++i) {
    at[i] = static_cast<unsigned char>(static_cast<u64>(bits) >> (8 * i));
  }
}

__device__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

template <class Word>
__global__ void digest_kernel(BoxView box, const unsigned char* data, u64* sum) {
  u64 local = 0;
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 k = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; k < box.count; k += step) {
    const ElementPlace place = element_of(box, k);
    local += mix(mix(place.index + 1) ^ static_cast<u64>(load_word<Word>(data + place.offset)));
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    local += __shfl_down_sync(~0u, local, offset);
  }
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), local);
  }
}

template <class Word>
__global__ void fill_kernel(BoxView box, FiniteRule rule, u64 seed, unsigned char* data) {
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 k = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; k < box.count; k += step) {
    const ElementPlace place = element_of(box, k);
    u64 bits = mix(seed + (place.index + 1) * 0x9e3779b97f4a7c15ULL) >> rule.shift;
    bits &= ~((bits & rule.exponent) == rule.exponent ? rule.lowest : 0);
    bits &= ~((bits & rule.exponent2) == rule.exponent2 ? rule.lowest2 : 0);
    store_word<Word>(data + place.offset, static_cast<Word>(bits == rule.nan ? 0 : bits));
  }
}

template <class Launch>
void with_word(u32 item_bytes, const Launch& launch) {
  switch (item_bytes) {
    case 1:
      return launch(std::uint8_t{});
    case 2:
      return launch(u16{});
    case 4:
      return launch(u32{});
    default:
      return launch(u64{});
  }
}

constexpr u32 kValueThreads = 256;
u32 value_blocks(u64 count) {
  const u64 blocks = (count + kValueThreads - 1) / kValueThreads;
  return static_cast<u32>(blocks < 4096 ? blocks : 4096);
}

u32 threads_for(u32 count) {
  return count > 1024 ? 1024 : count < 32 ? 32 : (count + 31) / 32 * 32;
}

}  // namespace

void load_kernels() {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, gate_kernel);
  cudaFuncGetAttributes(&attributes, list_kernel);
  cudaFuncGetAttributes(&attributes, abort_kernel);
}

void launch_gate(const Control& control, const Entry& entry, const Exit& exit,
                 cudaStream_t stream) {
  const u32 most = std::max({entry.ready.count, entry.gate_count, exit.signals.count});
  gate_kernel<<<1, threads_for(most), 0, stream>>>(control, entry, exit);
}

void launch_list(const Control& control, DeviceTables tables, ListSlice list, const Entry& entry,
                 const Exit& exit, int blocks, cudaStream_t stream) {
  constexpr u64 kWarps = kListThreads / kWarp;
  const u64 wanted = std::max<u64>(1, (list.tiles + kWarps - 1) / kWarps);
  // As many blocks as finish together: no last turn of a few.
  const u64 turns = (wanted + static_cast<u64>(blocks) - 1) / static_cast<u64>(blocks);
  const u64 grid = (wanted + turns - 1) / turns;
  list_kernel<<<static_cast<u32>(grid), kListThreads, 0, stream>>>(control, tables, list, entry,
                                                                   exit);
}

void launch_abort(const u64* const* words, u32 count, cudaStream_t stream) {
  abort_kernel<<<1, threads_for(count), 0, stream>>>(words, count);
}

void launch_digest(const BoxView& box, u32 item_bytes, const void* data, u64* sum,
                   cudaStream_t stream) {
  if (box.count == 0) {
    return;
  }
  with_word(item_bytes, [&](auto word) {
    digest_kernel<decltype(word)><<<value_blocks(box.count), kValueThreads, 0, stream>>>(
        box, static_cast<const unsigned char*>(data), sum);
  });
}

void launch_fill(const BoxView& box, u32 item_bytes, const FiniteRule& rule, u64 seed, void* data,
                 cudaStream_t stream) {
  if (box.count == 0) {
    return;
  }
  with_word(item_bytes, [&](auto word) {
    fill_kernel<decltype(word)><<<value_blocks(box.count), kValueThreads, 0, stream>>>(
        box, rule, seed, static_cast<unsigned char*>(data));
  });
}

}  // namespace m2n::nccl
