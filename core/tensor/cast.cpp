// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/cast.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {
namespace {

// On bits, without branches and without platform float types: the loops below vectorise, and the
// result is the same everywhere.

/// A choice that stays one: compilers turn ?: around float arithmetic into a branch.
inline std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) noexcept {
  const std::uint32_t mask = 0u - std::uint32_t{first};
  return (a & mask) | (b & ~mask);
}

inline std::uint16_t bf16_bits(std::uint32_t f32) noexcept {
  const std::uint32_t rounded = (f32 + 0x7fffu + ((f32 >> 16) & 1u)) >> 16;
  const std::uint32_t quieted = (f32 >> 16) | 0x40u;
  const bool nan = (f32 & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(nan ? quieted : rounded);
}

inline std::uint32_t f32_bits_of_bf16(std::uint16_t bf16) noexcept {
  const std::uint32_t f32 = std::uint32_t{bf16} << 16;
  const bool nan = (f32 & 0x7fffffffu) > 0x7f800000u;
  return f32 | (nan ? 0x400000u : 0u);
}

inline std::uint16_t f16_bits(std::uint32_t f32) noexcept {
  const std::uint32_t sign = (f32 >> 16) & 0x8000u;
  const std::uint32_t magnitude = f32 & 0x7fffffffu;
  // Four times the value, infinite from 2^16 on, plus the power of two whose own step is four
  // times the f16 step there (constant below 2^-14): the addition rounds, and leaves the f16
  // exponent less one in bits 13 to 17 and the significand, leading bit included, below.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f * 0x1p-110f;
  const std::uint32_t power = std::max(magnitude & 0x7f800000u, 113u << 23) + (15u << 23);
  const auto sum = std::bit_cast<std::uint32_t>(scaled + std::bit_cast<float>(power));
  const std::uint32_t rounded = ((sum >> 13) & 0x7c00u) + (sum & 0xfffu);
  const std::uint32_t quieted = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  return static_cast<std::uint16_t>(sign | choose(magnitude > 0x7f800000u, quieted, rounded));
}

inline std::uint32_t f32_bits_of_f16(std::uint16_t f16) noexcept {
  const std::uint32_t sign = (std::uint32_t{f16} & 0x8000u) << 16;
  const std::uint32_t magnitude = std::uint32_t{f16} & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  // A subnormal is its mantissa times 2^-24: put it behind the 1 of 2^-14 and take that 1 away.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(
      std::bit_cast<float>((magnitude << 13) | (113u << 23)) - std::bit_cast<float>(113u << 23));
  const std::uint32_t special =
      (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  const std::uint32_t finite = choose(magnitude < 0x400u, subnormal, normal);
  return sign | choose(magnitude >= 0x7c00u, special, finite);
}

inline std::uint16_t f16_bits_of_bf16(std::uint16_t bf16) noexcept {
  return f16_bits(f32_bits_of_bf16(bf16));
}

inline std::uint16_t bf16_bits_of_f16(std::uint16_t f16) noexcept {
  return bf16_bits(f32_bits_of_f16(f16));
}

template <auto Cast, class From, class To>
void cast_all(const std::byte* __restrict source, std::byte* __restrict destination,
              std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, source + i * sizeof(From), sizeof from);
    const To to = Cast(from);
    std::memcpy(destination + i * sizeof(To), &to, sizeof to);
  }
}

using CastLoop = void (*)(const std::byte*, std::byte*, std::uint64_t) noexcept;

/// Null where there is no cast between different types.
CastLoop loop_of(DType from, DType to) noexcept {
  using Half = std::uint16_t;
  using Word = std::uint32_t;
  if (from == DType::f32) {
    return to == DType::bf16  ? cast_all<bf16_bits, Word, Half>
           : to == DType::f16 ? cast_all<f16_bits, Word, Half>
                              : CastLoop{};
  }
  if (from == DType::bf16) {
    return to == DType::f32   ? cast_all<f32_bits_of_bf16, Half, Word>
           : to == DType::f16 ? cast_all<f16_bits_of_bf16, Half, Half>
                              : CastLoop{};
  }
  if (from == DType::f16) {
    return to == DType::f32    ? cast_all<f32_bits_of_f16, Half, Word>
           : to == DType::bf16 ? cast_all<bf16_bits_of_f16, Half, Half>
                               : CastLoop{};
  }
  return nullptr;
}

}  // namespace

std::uint16_t bf16_from_f32(float value) noexcept {
  return bf16_bits(std::bit_cast<std::uint32_t>(value));
}

std::uint16_t f16_from_f32(float value) noexcept {
  return f16_bits(std::bit_cast<std::uint32_t>(value));
}

float f32_from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(f32_bits_of_bf16(bits));
}

float f32_from_f16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(f32_bits_of_f16(bits));
}

bool can_cast(DType from, DType to) noexcept { return from == to || loop_of(from, to) != nullptr; }

void cast_elements(DType from, const std::byte* source, DType to, std::byte* destination,
                   std::uint64_t count) {
  if (from == to) {
    const std::uint64_t bytes = checked_mul_bytes(count, bytes_of(from));
    if (bytes != 0) {
      std::memcpy(destination, source, bytes);
    }
    return;
  }
  const CastLoop loop = loop_of(from, to);
  if (loop == nullptr) {
    throw Error(Errc::bad_argument, "no cast from " + std::string(to_string(from)) + " to " +
                                        std::string(to_string(to)) +
                                        ", expected equal types or two of f16, bf16 and f32");
  }
  loop(source, destination, count);
}

}  // namespace m2n
