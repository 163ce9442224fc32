// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Casts between floating-point types, bit-exact on every platform: round to nearest, ties to
/// even; subnormals are kept; NaN stays NaN (quieted, sign and leading payload bits kept);
/// overflow gives infinity (IEEE 754-2019, section 4.3.1).

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/tensor/dtype.hpp"

namespace m2n {

std::uint16_t bf16_from_f32(float value) noexcept;
std::uint16_t f16_from_f32(float value) noexcept;
/// Exact; a signalling NaN is quieted.
float f32_from_bf16(std::uint16_t bits) noexcept;
float f32_from_f16(std::uint16_t bits) noexcept;

/// True for equal types and between any two of f16, bf16, f32.
bool can_cast(DType from, DType to) noexcept;

/// Casts @p count contiguous elements; any alignment; the ranges must not overlap.
/// @throws Error{bad_argument} naming both types when can_cast() is false.
void cast_elements(DType from, const std::byte* source, DType to, std::byte* destination,
                   std::uint64_t count);

}  // namespace m2n
