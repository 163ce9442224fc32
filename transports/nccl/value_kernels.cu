// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Digests and synthetic values on the device: the rules of core/tensor/digest.cpp.

#include "transports/nccl/kernels.hpp"

namespace m2n::nccl {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

constexpr int kWarp = 32;

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

}  // namespace

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
