// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/kernels.hpp"

#include <algorithm>

#include "transports/nccl/copy.cuh"
#include "transports/nccl/quantise.cuh"

namespace m2n::nccl {
namespace {

constexpr int kListThreads = 512;
constexpr u32 kSpinsPerAbortCheck = 64;

__device__ u64 load_acquire(const volatile u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_release(u64 address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Adds 1. What the calling thread has seen is seen by whoever adds later, on every device.
__device__ u64 count_in(u64* counter) {
  u64 before;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], 1;"
               : "=l"(before)
               : "l"(counter)
               : "memory");
  return before;
}

__device__ void store_relaxed(u64 address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Entry @p threadIdx.x of a table, loaded long before it is needed.
template <class Item>
__device__ Item own_item(const Item* items, u32 count) {
  return threadIdx.x < count ? items[threadIdx.x] : Item{};
}

__device__ bool is_given_up(const Control& control) {
  return *reinterpret_cast<volatile u64*>(&control.host->abort) != 0 ||
         load_acquire(&control.head->abort) != 0;
}

/// What a thread knows of the round once its kernel has begun.
struct Begun {
  u64 round;
  bool failed;
};

/// Tells sources that memory may be written. Whatever used that memory was a kernel before this
/// one: no fence.
__device__ Begun begin(const Control& control, const Entry& entry) {
  const Begun begun{control.head->round,
                    *reinterpret_cast<volatile u64*>(&control.head->failed) != 0};
  if (blockIdx.x == 0 && !begun.failed) {
    for (u32 i = threadIdx.x; i < entry.ready.count; i += blockDim.x) {
      const Signal signal = entry.ready.signals[i];
      store_relaxed(signal.address, begun.round * control.stride + signal.add);
    }
  }
  return begun;
}

/// Waits for the gates. By a whole block. True when the work may begin.
__device__ bool enter(const Control& control, const Entry& entry, const Begun& begun) {
  bool failed = begun.failed;
  for (u32 i = threadIdx.x; i < entry.gate_count && !failed; i += blockDim.x) {
    const Gate gate = entry.gates[i];
    const u64 wanted = begun.round * control.stride + gate.add;
    u32 spins = 0;
    while (load_acquire(control.flags + gate.flag) < wanted) {
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
    store_relaxed(reinterpret_cast<u64>(&control.host->opened),
                  begun.round * control.stride + entry.opened);
  }
  return !failed;
}

/// By one whole block, after all work. @param own  own_item() of the signals.
__device__ void leave(const Control& control, const Exit& exit, u64 round, Signal own) {
  for (u32 i = threadIdx.x; i < exit.signals.count; i += blockDim.x) {
    const Signal signal = i < blockDim.x ? own : exit.signals.signals[i];
    store_release(signal.address, round * control.stride + signal.add);
  }
  // Beside the first signal, not after it; all work is fenced already, or of kernels before.
  if (exit.last && threadIdx.x == blockDim.x - 1) {
    control.head->round = round + 1;
    store_relaxed(reinterpret_cast<u64>(&control.host->finished), round);
  }
}

__global__ void gate_kernel(Control control, Entry entry, Exit exit) {
  const Begun begun = begin(control, entry);
  const Signal own = own_item(exit.signals.signals, exit.signals.count);
  if (enter(control, entry, begun)) {
    leave(control, exit, begun.round, own);
  }
}

/// The task of @p tile, at or after task @p at. All lanes of a warp together.
__device__ u64 find_task(const Task* __restrict__ tasks, u64 count, u64 at, u64 tile, u32 lane) {
  // Lists are walked forward: a few tasks ahead first, then the rest.
  constexpr u64 kAhead = 8;
  u64 low = at + lane * kAhead;
  const u32 near = __ballot_sync(~0u, low < count && tasks[low].first_tile <= tile);
  const u32 steps = 31 - __clz(static_cast<int>(near));
  low = at + steps * kAhead;
  u64 high = steps == kWarp - 1 ? count : min(low + kAhead, count);
  while (high - low > 1) {
    const u64 step = (high - low + kWarp - 1) / kWarp;
    const u64 probe = low + lane * step;
    const u32 before = __ballot_sync(~0u, probe < high && tasks[probe].first_tile <= tile);
    low += static_cast<u64>(31 - __clz(static_cast<int>(before))) * step;
    high = min(low + step, high);
  }
  return low;
}

/// @tparam kQuantises  Whether tasks of the list may: that takes registers from the others.
template <bool kQuantises>
__global__ void __launch_bounds__(kListThreads)
    list_kernel(Control control, DeviceTables tables, ListSlice list, Entry entry, Exit exit) {
  const Begun begun = begin(control, entry);
  const Task* tasks = tables.tasks + list.begin;
  const u32 lane = threadIdx.x % kWarp;
  const u64 warps = static_cast<u64>(gridDim.x) * (kListThreads / kWarp);
  // A block's warps take neighbouring tiles, which is fastest; those of a short list are spread, so
  // that it uses all processors.
  constexpr u32 kWarpsPerBlock = kListThreads / kWarp;
  const u32 own = threadIdx.x / kWarp;
  const u64 warp = list.tiles >= 4 * warps ? static_cast<u64>(blockIdx.x) * kWarpsPerBlock + own
                                           : static_cast<u64>(own) * gridDim.x + blockIdx.x;
  // The search for the first task passes the time until the gates open.
  u64 at = find_task(tasks, list.count, 0, warp, lane);
  const Signal own_signal = own_item(exit.signals.signals, exit.signals.count);
  if (!enter(control, entry, begun)) {
    return;
  }
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
      case Convert::f32_to_f8:
        if constexpr (kQuantises) {
          quantise_units<Convert::f32_to_f8>(task, tables.loops, begin, end, lane);
        }
        break;
      case Convert::bf16_to_f8:
        if constexpr (kQuantises) {
          quantise_units<Convert::bf16_to_f8>(task, tables.loops, begin, end, lane);
        }
        break;
      case Convert::f16_to_f8:
        if constexpr (kQuantises) {
          quantise_units<Convert::f16_to_f8>(task, tables.loops, begin, end, lane);
        }
        break;
    }
  }
  if (exit.signals.count == 0 && !exit.last) {
    return;
  }
  __shared__ bool is_last_block;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last_block = count_in(&control.head->arrived) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last_block) {
    if (threadIdx.x == 0) {
      control.head->arrived = 0;
    }
    leave(control, exit, begun.round, own_signal);
  }
}

__global__ void abort_kernel(const u64* const* words, u32 count, u64 mark) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    store_release(reinterpret_cast<u64>(words[i]), mark);
  }
}

u32 threads_for(u32 count) {
  return count > 1024 ? 1024 : count < 32 ? 32 : (count + 31) / 32 * 32;
}

}  // namespace

void load_kernels() {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, gate_kernel);
  cudaFuncGetAttributes(&attributes, list_kernel<false>);
  cudaFuncGetAttributes(&attributes, list_kernel<true>);
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
  const auto kernel = list.quantises ? list_kernel<true> : list_kernel<false>;
  kernel<<<static_cast<u32>(grid), kListThreads, 0, stream>>>(control, tables, list, entry, exit);
}

void launch_abort(const u64* const* words, u32 count, u64 mark, cudaStream_t stream) {
  abort_kernel<<<1, threads_for(count), 0, stream>>>(words, count, mark);
}

}  // namespace m2n::nccl
