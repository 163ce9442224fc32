// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Casts on the device: word for word the rules of core/tensor/cast.cpp and block_scales.cpp.

#include <cstdint>

#include "transports/nccl/task.hpp"

namespace m2n::nccl {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

__device__ inline u32 choose(bool first, u32 a, u32 b) { return first ? a : b; }

__device__ inline u32 bf16_of_f32(u32 f32) {
  const u32 rounded = (f32 + 0x7fffu + ((f32 >> 16) & 1u)) >> 16;
  const u32 quieted = (f32 >> 16) | 0x40u;
  return (f32 & 0x7fffffffu) > 0x7f800000u ? quieted : rounded;
}

__device__ inline u32 f32_of_bf16(u32 bf16) {
  const u32 f32 = bf16 << 16;
  return f32 | ((f32 & 0x7fffffffu) > 0x7f800000u ? 0x400000u : 0u);
}

__device__ inline u32 f16_of_f32(u32 f32) {
  const u32 sign = (f32 >> 16) & 0x8000u;
  const u32 magnitude = f32 & 0x7fffffffu;
  const float scaled = __fmul_rn(__fmul_rn(__uint_as_float(magnitude), 0x1p112f), 0x1p-110f);
  const u32 power = max(magnitude & 0x7f800000u, 113u << 23) + (15u << 23);
  const u32 sum = __float_as_uint(__fadd_rn(scaled, __uint_as_float(power)));
  const u32 rounded = ((sum >> 13) & 0x7c00u) + (sum & 0xfffu);
  const u32 quieted = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  return (sign | choose(magnitude > 0x7f800000u, quieted, rounded)) & 0xffffu;
}

__device__ inline u32 f32_of_f16(u32 f16) {
  const u32 sign = (f16 & 0x8000u) << 16;
  const u32 magnitude = f16 & 0x7fffu;
  const u32 normal = (magnitude << 13) + (112u << 23);
  const u32 subnormal = __float_as_uint(
      __fsub_rn(__uint_as_float((magnitude << 13) | (113u << 23)), __uint_as_float(113u << 23)));
  const u32 special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  const u32 finite = choose(magnitude < 0x400u, subnormal, normal);
  return sign | choose(magnitude >= 0x7c00u, special, finite);
}

/// An element, from a value over its scale.
__device__ inline u32 f8_of_f32(u32 f32) {
  const u32 magnitude = f32 & 0x7fffffffu;
  const u32 kept = min(magnitude, __float_as_uint(448.0f));
  const u32 power = max(kept & 0x7f800000u, 121u << 23) + (20u << 23);
  const u32 sum = __float_as_uint(__fadd_rn(__uint_as_float(kept), __uint_as_float(power)));
  const u32 size = ((power >> 23) - 141u) * 8u + (sum & 0x1fu);
  return choose(magnitude > 0x7f800000u, 0x7fu, (f32 >> 24 & 0x80u) | size);
}

/// block_scale() of the largest magnitude.
__device__ inline float scale_of(float largest) {
  const float scale = __fdiv_rn(largest, 448.0f);
  if (scale != scale) {
    return __uint_as_float(0x7fc00000u);
  }
  return scale == 0.0f ? 1.0f : scale;
}

__device__ inline bool quantises(Convert convert) { return convert >= Convert::f32_to_f8; }

/// The value of an element that will be quantised.
__device__ inline float value_of(Convert convert, u32 bits) {
  return __uint_as_float(convert == Convert::bf16_to_f8  ? f32_of_bf16(bits)
                         : convert == Convert::f16_to_f8 ? f32_of_f16(bits)
                                                         : bits);
}

/// Whether no step of divide() by @p scale leaves the normal numbers where it counts.
__device__ inline bool is_plain(float scale) { return scale > 0x1p-80f && scale < 0x1p121f; }

/// __fdiv_rn(value, scale): the first quotient is corrected twice by its remainder, which is exact
/// (Markstein, IBM J. Res. Dev. 34, 1990). Where the first is so small that the element is 0, or so
/// large that it is 448 or NaN, it stays; the sign is right.
/// @param inverse  __frcp_rn(scale). @pre is_plain(scale).
__device__ inline float divide(float value, float scale, float inverse) {
  const float first = __fmul_rn(value, inverse);
  const float second = __fmaf_rn(__fmaf_rn(-first, scale, value), inverse, first);
  const float third = __fmaf_rn(__fmaf_rn(-second, scale, value), inverse, second);
  const float size = fabsf(first);
  return size > 0x1p-12f && size < 0x1p100f ? third : first;
}

/// Elements of @p low and, in the byte above, of @p high, as f8_of_f32() has them.
__device__ inline u32 f8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return f8_of_f32(__float_as_uint(low)) | f8_of_f32(__float_as_uint(high)) << 8;
#endif
}

__device__ inline u32 quantise(Convert convert, u32 bits, float scale) {
  return f8_of_f32(__float_as_uint(__fdiv_rn(value_of(convert, bits), scale)));
}

__device__ inline u32 cast(Convert convert, u32 bits) {
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
    case Convert::f32_to_f8:
    case Convert::bf16_to_f8:
    case Convert::f16_to_f8:
      break;
  }
  return bits;
}

}  // namespace m2n::nccl
