// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The layout-independent digest of a tensor, and values that depend only on name and index.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words.
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// What one element adds to a digest: mix64(mix64(index + 1) ^ bits), where index is the global
/// row-major element index and bits the element zero-extended to 64 bits.
constexpr std::uint64_t digest_term(std::uint64_t index, std::uint64_t bits) noexcept {
  return mix64(mix64(index + 1) ^ bits);
}

/// Sum mod 2^64 of digest_term() over the elements of @p box. Sums of disjoint boxes that cover a
/// tensor add up to the tensor's digest, whatever the layout.
/// @param shape    Global shape, for the element index.
/// @param data     Address of the element at box.lo.
/// @param strides  In elements, one a dimension.
std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype, const std::byte* data,
                            const Strides& strides);

/// Seed of the synthetic values of a parameter: 64-bit FNV-1a of its name.
std::uint64_t synthetic_seed(std::string_view name) noexcept;

/// How random bits become a finite value of a type. Plain, so that other processors can apply it.
struct FiniteRule {
  std::uint32_t shift = 0;      ///< Right, of 64 random bits.
  std::uint64_t exponent = 0;   ///< All ones here is infinite or NaN ...
  std::uint64_t lowest = 0;     ///< ... and clearing this bit makes it finite; 0 for none.
  std::uint64_t exponent2 = 0;  ///< Likewise, of an imaginary part.
  std::uint64_t lowest2 = 0;
  std::uint64_t nan = 0;  ///< A bit pattern that becomes 0: the only NaN of the fnuz types.
};
FiniteRule finite_rule(DType dtype);

/// Bits of element @p index of a synthetic parameter, in the low bits of the result: the top bits
/// of mix64(seed + (index + 1) * 0x9e3779b97f4a7c15), as many as an element has; a bool is the top
/// bit. No value is NaN or infinite: an exponent that is all ones (of each part of a c64) has its
/// lowest bit cleared, and the one NaN of the fnuz types, 0x80, becomes 0; f4 and f6_* have no such
/// value and stay as they are. f32 to bf16 casts therefore stay finite but for the last binade.
std::uint64_t synthetic_bits(DType dtype, std::uint64_t seed, std::uint64_t index) noexcept;

/// Writes the synthetic values of @p box at @p data (element at box.lo) with @p strides in
/// elements.
void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                    std::byte* data, const Strides& strides);

}  // namespace m2n
