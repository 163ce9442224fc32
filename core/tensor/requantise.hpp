// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// f8_e4m3 weights under another scale: the value of an element is weight * scale, and under the
/// new scale it is the nearest that can be written.

#include <cstddef>
#include <cstdint>

namespace m2n {

/// Exact; 0x7f and 0xff are NaN.
float f32_from_f8_e4m3(std::uint8_t bits) noexcept;

/// The nearest element, of two equally near the one with an even last bit. Larger than 448 gives
/// 448; NaN stays NaN, and signs stay.
std::uint8_t f8_e4m3_from_real(double value) noexcept;

/// Whether f8_e8m0 has this number: a power of two from 2^-127 to 2^127.
bool is_f8_e8m0(float value) noexcept;
/// The exponent plus 127. @pre is_f8_e8m0(value).
std::uint8_t f8_e8m0_from_f32(float value) noexcept;

/// The smallest power of two that is not less than @p scale.
/// @throws Error{bad_argument} for a scale that is not positive and finite, or above 2^127.
float power_of_two_scale(float scale);

/// Quantises @p count contiguous weights anew: each becomes the nearest to weight * from / to, in
/// one rounding of the quotient in f64. Equal scales change nothing.
/// @pre from and to are positive and finite.
void requantise_f8_e4m3(std::byte* weights, std::uint64_t count, float from, float to);

}  // namespace m2n
