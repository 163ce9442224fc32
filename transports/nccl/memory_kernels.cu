// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/memory_kernels.hpp"

#include "transports/nccl/cast.cuh"

namespace m2n::nccl {
namespace {

constexpr int kWarp = 32;
constexpr u32 kThreads = 256;
constexpr u32 kMostBlocks = 4096;

__device__ u64 quotient(u64 a, u64 b) {
  return ((a | b) >> 32) == 0 ? static_cast<u32>(a) / static_cast<u32>(b) : a / b;
}

struct ElementPlace {
  u64 index;
  i64 offset;
};

/// Of element @p k. The outermost dimension needs no division.
__device__ ElementPlace element_of(const ElementView& box, u64 k) {
  ElementPlace place{box.first_index, 0};
  for (int d = box.rank; d-- > 0;) {
    u64 next = 0;
    if (d > 0) {
      next = quotient(k, box.extents[d]);
    }
    const u64 at = k - next * box.extents[d];
    place.index += at * box.index_steps[d];
    place.offset += static_cast<i64>(at) * box.byte_steps[d];
    k = next;
  }
  return place;
}

template <class Word>
__device__ Word load_word(u64 address) {
  if (address % sizeof(Word) == 0) {
    return *reinterpret_cast<const Word*>(address);
  }
  const auto* at = reinterpret_cast<const unsigned char*>(address);
  u64 bits = 0;
  for (u32 i = 0; i < sizeof(Word); ++i) {
    bits |= static_cast<u64>(at[i]) << (8 * i);
  }
  return static_cast<Word>(bits);
}

template <class Word>
__device__ void store_word(u64 address, Word bits) {
  if (address % sizeof(Word) == 0) {
    *reinterpret_cast<Word*>(address) = bits;
    return;
  }
  auto* at = reinterpret_cast<unsigned char*>(address);
  for (u32 i = 0; i < sizeof(Word); ++i) {
    at[i] = static_cast<unsigned char>(static_cast<u64>(bits) >> (8 * i));
  }
}

__device__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr u64 kGolden = 0x9e3779b97f4a7c15ULL;

/// changed_bits() of core/tensor/changes.hpp.
__device__ u64 changed(u64 changeable, u64 version, u64 index) {
  return version == 0 ? 0 : (mix(version * kGolden + index) + version) & changeable;
}

/// synthetic_bits() of core/tensor/digest.hpp, changed.
__device__ u64 value_at(const ValueRule& rule, u64 index) {
  u64 bits = mix(rule.seed + (index + 1) * kGolden) >> rule.finite.shift;
  bits &= ~((bits & rule.finite.exponent) == rule.finite.exponent ? rule.finite.lowest : 0);
  bits &= ~((bits & rule.finite.exponent2) == rule.finite.exponent2 ? rule.finite.lowest2 : 0);
  bits = bits == rule.finite.nan ? 0 : bits;
  return bits ^ changed(rule.changeable, rule.version, index);
}

__device__ u64 first_element() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ u64 element_step() { return static_cast<u64>(gridDim.x) * blockDim.x; }

template <class Word>
__global__ void fill_kernel(ElementView box, ValueRule rule) {
  for (u64 k = first_element(); k < box.count; k += element_step()) {
    const ElementPlace place = element_of(box, k);
    store_word<Word>(box.data + static_cast<u64>(place.offset),
                     static_cast<Word>(value_at(rule, place.index)));
  }
}

template <class Word>
__global__ void change_kernel(ElementView box, u64 changeable, u64 from, u64 to) {
  for (u64 k = first_element(); k < box.count; k += element_step()) {
    const ElementPlace place = element_of(box, k);
    const u64 address = box.data + static_cast<u64>(place.offset);
    const u64 flips = changed(changeable, from, place.index) ^ changed(changeable, to, place.index);
    store_word<Word>(address,
                     static_cast<Word>(static_cast<u64>(load_word<Word>(address)) ^ flips));
  }
}

template <class Word>
__global__ void compare_kernel(ElementView box, ValueRule rule, Convert convert,
                               WrongWords* wrong) {
  u64 count = 0;
  u64 first = ~0ull;
  for (u64 k = first_element(); k < box.count; k += element_step()) {
    const ElementPlace place = element_of(box, k);
    u64 expected = value_at(rule, place.index);
    if (convert != Convert::none) {
      expected = cast(convert, static_cast<u32>(expected));
    }
    if (load_word<Word>(box.data + static_cast<u64>(place.offset)) != static_cast<Word>(expected)) {
      first = count++ == 0 ? k : first;
    }
  }
  if (count > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&wrong->count), count);
    atomicMin(reinterpret_cast<unsigned long long*>(&wrong->first), first);
  }
}

template <class Word>
__device__ u64 digest_chunk(const ElementView& box, Convert convert, u64 begin, u64 end) {
  u64 sum = 0;
  for (u64 k = begin + threadIdx.x; k < end; k += blockDim.x) {
    const ElementPlace place = element_of(box, k);
    u64 bits = load_word<Word>(box.data + static_cast<u64>(place.offset));
    if (convert != Convert::none) {
      bits = cast(convert, static_cast<u32>(bits));
    }
    sum += mix(mix(place.index + 1) ^ bits);
  }
  return sum;
}

/// Of a task that quantises. Its dimensions are such that scales lie regularly.
template <class Word>
__device__ u64 digest_quantised(const DigestTask& task, u64 begin, u64 end) {
  const ElementView& box = task.box;
  u64 sum = 0;
  for (u64 element = begin + threadIdx.x; element < end; element += blockDim.x) {
    u64 k = element;
    u64 index = box.first_index;
    u64 address = box.data;
    u64 scale = task.scales;
    for (int d = box.rank; d-- > 0;) {
      const u64 next = d > 0 ? quotient(k, box.extents[d]) : 0;
      const u64 at = k - next * box.extents[d];
      index += at * box.index_steps[d];
      address += static_cast<u64>(static_cast<i64>(at) * box.byte_steps[d]);
      scale += static_cast<u64>(static_cast<i64>(at) * task.scale_steps[d]);
      k = next;
    }
    const u64 bits =
        quantise(task.convert, load_word<Word>(address), __uint_as_float(load_word<u32>(scale)));
    sum += mix(mix(index + 1) ^ bits);
  }
  return sum;
}

__device__ u64 digest_of(const DigestTask& task, u64 begin, u64 end) {
  if (quantises(task.convert)) {
    return task.box.item_bytes == 4 ? digest_quantised<u32>(task, begin, end)
                                    : digest_quantised<u16>(task, begin, end);
  }
  switch (task.box.item_bytes) {
    case 1:
      return digest_chunk<std::uint8_t>(task.box, task.convert, begin, end);
    case 2:
      return digest_chunk<u16>(task.box, task.convert, begin, end);
    case 4:
      return digest_chunk<u32>(task.box, task.convert, begin, end);
    default:
      return digest_chunk<u64>(task.box, task.convert, begin, end);
  }
}

/// The last of @p count tasks whose @p first is not above @p at.
template <class Task>
__device__ u64 task_of(const Task* __restrict__ tasks, u64 count, u64 Task::*first, u64 at) {
  u64 low = 0;
  u64 high = count;
  while (high - low > 1) {
    const u64 middle = low + (high - low) / 2;
    (tasks[middle].*first <= at ? low : high) = middle;
  }
  return low;
}

__global__ void digests_kernel(const DigestTask* __restrict__ tasks, u64 count, u64 chunks,
                               u64* sums) {
  // Bytes, for shared memory takes no constructors.
  __shared__ alignas(DigestTask) unsigned char task_bytes[sizeof(DigestTask)];
  __shared__ u64 number;
  auto& task = *reinterpret_cast<DigestTask*>(task_bytes);
  for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    __syncthreads();  // nobody reads the last one any more
    if (threadIdx.x == 0) {
      number = task_of(tasks, count, &DigestTask::first_chunk, chunk);
      task = tasks[number];
    }
    __syncthreads();
    const u64 begin = (chunk - task.first_chunk) * kDigestChunk;
    const u64 rest = task.box.count - begin;
    const u64 end = begin + (rest < kDigestChunk ? rest : kDigestChunk);
    u64 sum = digest_of(task, begin, end);
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum += __shfl_down_sync(~0u, sum, offset);
    }
    if (threadIdx.x % kWarp == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(sums + number), sum);
    }
  }
}

__device__ void copy_item(const CopyView& copy, u64 source, u64 destination) {
  switch (copy.source_bytes) {
    case 1:
      store_word(destination, load_word<std::uint8_t>(source));
      return;
    case 2:
      store_word(destination, load_word<u16>(source));
      return;
    case 4:
      store_word(destination, load_word<u32>(source));
      return;
    case 8:
      store_word(destination, load_word<u64>(source));
      return;
    default:  // 16, and aligned
      *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(source);
      return;
  }
}

__global__ void copy_kernel(CopyView copy) {
  for (u64 element = first_element(); element < copy.count; element += element_step()) {
    u64 k = element;
    u64 source = copy.source;
    u64 destination = copy.destination;
    u64 scale = copy.scales;
    for (int d = copy.rank; d-- > 0;) {
      const u64 next = d > 0 ? k / copy.extents[d] : 0;
      const auto at = static_cast<i64>(k - next * copy.extents[d]);
      source += static_cast<u64>(at * copy.source_steps[d]);
      destination += static_cast<u64>(at * copy.destination_steps[d]);
      scale += static_cast<u64>(at * copy.scale_steps[d]);
      k = next;
    }
    if (copy.convert == Convert::none) {
      copy_item(copy, source, destination);
      continue;
    }
    const u32 bits = copy.source_bytes == 4 ? load_word<u32>(source) : load_word<u16>(source);
    if (quantises(copy.convert)) {
      const u32 out = quantise(copy.convert, bits, __uint_as_float(load_word<u32>(scale)));
      store_word(destination, static_cast<std::uint8_t>(out));
      continue;
    }
    const u32 out = cast(copy.convert, bits);
    if (copy.destination_bytes == 4) {
      store_word(destination, out);
    } else {
      store_word(destination, static_cast<u16>(out));
    }
  }
}

/// A block of elements: where it begins, and its extents.
struct BlockPlace {
  u64 data;
  u64 scale;
  u64 extents[ElementView::kMaxRank];
};

__device__ BlockPlace block_of(const ScaleTask& task, u64 k) {
  BlockPlace place{task.data, task.scales, {}};
  for (int d = task.rank; d-- > 0;) {
    const u64 next = k / task.counts[d];
    const u64 at = k - next * task.counts[d];
    const u64 first = at * task.blocks[d];
    const u64 rest = task.extents[d] - first;
    place.extents[d] = rest < task.blocks[d] ? rest : task.blocks[d];
    place.data += static_cast<u64>(static_cast<i64>(first) * task.steps[d]);
    place.scale += static_cast<u64>(static_cast<i64>(at) * task.scale_steps[d]);
    k = next;
  }
  return place;
}

/// The largest of the magnitudes in a word of two 16-bit items, or of one of 32 bits.
template <class Word>
__device__ u32 largest_of(u32 word) {
  if constexpr (sizeof(Word) == 2) {
    return max(word & 0x7fffu, word >> 16 & 0x7fffu);
  } else {
    return word & 0x7fffffffu;
  }
}

template <class Word>
__device__ u32 largest_of(const uint4& words) {
  return max(max(largest_of<Word>(words.x), largest_of<Word>(words.y)),
             max(largest_of<Word>(words.z), largest_of<Word>(words.w)));
}

/// The same of rows at a pitch, of @p row_units segments each: several loads under way.
template <class Word>
__device__ u32 largest_of_rows(u64 data, i64 pitch, u32 row_units, u32 units) {
  u32 largest = 0;
#pragma unroll 8
  for (u32 unit = threadIdx.x; unit < units; unit += kThreads) {
    const u32 row = unit / row_units;
    const u64 address = data + static_cast<u64>(static_cast<i64>(row) * pitch) +
                        static_cast<u64>(unit - row * row_units) * 16;
    largest = max(largest, largest_of<Word>(*reinterpret_cast<const uint4*>(address)));
  }
  return largest;
}

/// The largest magnitude, as bits, that this thread finds in its share of a block.
template <class Word>
__device__ u32 largest_bits(const ScaleTask& task, const BlockPlace& block) {
  constexpr u64 kWide = 16 / sizeof(Word);  // elements of a wide load
  const int inner = task.rank - 1;
  const u64 row = inner < 0 ? 1 : block.extents[inner];
  u64 rows = 1;
  u64 address_bits = block.data | row * sizeof(Word);
  for (int d = 0; d < inner; ++d) {
    rows *= block.extents[d];
    address_bits |= static_cast<u64>(task.steps[d]);
  }
  const bool wide = inner >= 0 && task.steps[inner] == sizeof(Word) && address_bits % 16 == 0;
  const u64 width = wide ? kWide : 1;
  const u64 units_of_row = row / width;
  const u64 units = rows * units_of_row;
  if (wide && inner > 0 && rows == block.extents[inner - 1] && units <= INT32_MAX) {
    return largest_of_rows<Word>(block.data, task.steps[inner - 1], static_cast<u32>(units_of_row),
                                 static_cast<u32>(units));
  }
  u32 largest = 0;
  for (u64 unit = threadIdx.x; unit < units; unit += blockDim.x) {
    u64 k = quotient(unit, units_of_row);
    const u64 at = (unit - k * units_of_row) * width;
    u64 address = block.data;
    if (inner >= 0) {
      address += static_cast<u64>(static_cast<i64>(at) * task.steps[inner]);
    }
    for (int d = inner; d-- > 0;) {
      const u64 next = d > 0 ? quotient(k, block.extents[d]) : 0;
      address += static_cast<u64>(static_cast<i64>(k - next * block.extents[d]) * task.steps[d]);
      k = next;
    }
    if (wide) {
      largest = max(largest, largest_of<Word>(*reinterpret_cast<const uint4*>(address)));
    } else {
      largest = max(largest, largest_of<Word>(load_word<Word>(address)));
    }
  }
  return largest;
}

__global__ void block_scales_kernel(const ScaleTask* __restrict__ tasks, u64 count, u64 scales) {
  __shared__ alignas(ScaleTask) unsigned char task_bytes[sizeof(ScaleTask)];
  __shared__ u32 warps[kThreads / kWarp];
  __shared__ u64 next_task;
  auto& task = *reinterpret_cast<ScaleTask*>(task_bytes);
  // Neighbours are of one task nearly always.
  const u64 share = (scales + gridDim.x - 1) / gridDim.x;
  const u64 last = min(scales, (blockIdx.x + 1) * share);
  u64 task_end = 0;
  for (u64 scale = blockIdx.x * share; scale < last; ++scale) {
    __syncthreads();  // nobody reads what the last one has shared any more
    if (scale >= task_end) {
      if (threadIdx.x == 0) {
        const u64 number = task_of(tasks, count, &ScaleTask::first_scale, scale);
        task = tasks[number];
        next_task = number + 1 < count ? tasks[number + 1].first_scale : scales;
      }
      __syncthreads();
      task_end = next_task;
    }
    const BlockPlace block = block_of(task, scale - task.first_scale);
    u32 largest = task.convert == Convert::f32_to_f8 ? largest_bits<u32>(task, block)
                                                     : largest_bits<u16>(task, block);
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_down_sync(~0u, largest, offset));
    }
    if (threadIdx.x % kWarp == 0) {
      warps[threadIdx.x / kWarp] = largest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (const u32 other : warps) {
        largest = max(largest, other);
      }
      store_word(block.scale, __float_as_uint(scale_of(value_of(task.convert, largest))));
    }
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

u32 blocks_for(u64 count) {
  const u64 blocks = (count + kThreads - 1) / kThreads;
  return static_cast<u32>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace

void load_memory_kernels() {
  cudaFuncAttributes attributes;
  for (const u32 bytes : {1u, 2u, 4u, 8u}) {
    with_word(bytes, [&](auto word) {
      cudaFuncGetAttributes(&attributes, fill_kernel<decltype(word)>);
      cudaFuncGetAttributes(&attributes, change_kernel<decltype(word)>);
      cudaFuncGetAttributes(&attributes, compare_kernel<decltype(word)>);
    });
  }
  cudaFuncGetAttributes(&attributes, digests_kernel);
  cudaFuncGetAttributes(&attributes, copy_kernel);
  cudaFuncGetAttributes(&attributes, block_scales_kernel);
}

void launch_fill(const ElementView& box, const ValueRule& rule, cudaStream_t stream) {
  if (box.count == 0) {
    return;
  }
  with_word(box.item_bytes, [&](auto word) {
    fill_kernel<decltype(word)><<<blocks_for(box.count), kThreads, 0, stream>>>(box, rule);
  });
}

void launch_change(const ElementView& box, u64 changeable, u64 from, u64 to, cudaStream_t stream) {
  if (box.count == 0) {
    return;
  }
  with_word(box.item_bytes, [&](auto word) {
    change_kernel<decltype(word)>
        <<<blocks_for(box.count), kThreads, 0, stream>>>(box, changeable, from, to);
  });
}

void launch_compare(const ElementView& box, const ValueRule& rule, Convert convert,
                    WrongWords* wrong, cudaStream_t stream) {
  if (box.count == 0) {
    return;
  }
  with_word(box.item_bytes, [&](auto word) {
    compare_kernel<decltype(word)>
        <<<blocks_for(box.count), kThreads, 0, stream>>>(box, rule, convert, wrong);
  });
}

void launch_digests(const DigestTask* tasks, u64 count, u64 chunks, u64* sums,
                    cudaStream_t stream) {
  if (chunks == 0) {
    return;
  }
  const auto blocks = static_cast<u32>(chunks < kMostBlocks ? chunks : kMostBlocks);
  digests_kernel<<<blocks, kThreads, 0, stream>>>(tasks, count, chunks, sums);
}

void launch_copy(const CopyView& copy, cudaStream_t stream) {
  if (copy.count == 0) {
    return;
  }
  copy_kernel<<<blocks_for(copy.count), kThreads, 0, stream>>>(copy);
}

void launch_block_scales(const ScaleTask* tasks, u64 count, u64 scales, cudaStream_t stream) {
  if (scales == 0) {
    return;
  }
  const auto blocks = static_cast<u32>(scales < kMostBlocks ? scales : kMostBlocks);
  block_scales_kernel<<<blocks, kThreads, 0, stream>>>(tasks, count, scales);
}

}  // namespace m2n::nccl
