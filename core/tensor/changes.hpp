// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Values that change with every version, whatever they were: a rule that anybody can apply to any
/// part of a tensor, and take back.

#include <cstddef>
#include <cstdint>

#include "core/tensor/digest.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// Bits of an element that a version may flip: of the mantissa for floating-point types, so that
/// finite values stay finite, and any for the others.
std::uint64_t changeable_bits(DType dtype) noexcept;

/// Bits that version @p version flips in element @p index, given changeable_bits(). Version 0 flips
/// none.
constexpr std::uint64_t changed_bits(std::uint64_t changeable, std::uint64_t version,
                                     std::uint64_t index) noexcept {
  return version == 0 ? 0 : (mix64(version * 0x9e3779b97f4a7c15ULL + index) + version) & changeable;
}

/// Turns the elements of @p box from those of version @p from into those of version @p to.
/// @param shape    Global shape, for the element index.
/// @param data     Address of the element at box.lo.
/// @param strides  In elements, one a dimension.
void change_values(const Shape& shape, const Box& box, DType dtype, std::uint64_t from,
                   std::uint64_t to, std::byte* data, const Strides& strides);

}  // namespace m2n
