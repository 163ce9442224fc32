// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/requantise.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "core/error.hpp"

namespace m2n {
namespace {

constexpr int kBias = 7;
constexpr int kMantissaBits = 3;
constexpr int kLowestExponent = 1 - kBias;
constexpr std::uint8_t kSign = 0x80;
constexpr std::uint8_t kNan = 0x7f;
constexpr std::uint8_t kLargest = 0x7e;  ///< 448
constexpr std::uint32_t kF32Mantissa = 0x7fffff;

}  // namespace

float f32_from_f8_e4m3(std::uint8_t bits) noexcept {
  const int exponent = bits >> kMantissaBits & 15;
  const int mantissa = bits & 7;
  float size = 0;
  if ((bits & kNan) == kNan) {
    size = std::nanf("");
  } else if (exponent == 0) {
    size = std::ldexp(static_cast<float>(mantissa), kLowestExponent - kMantissaBits);
  } else {
    size = std::ldexp(static_cast<float>(8 + mantissa), exponent - kBias - kMantissaBits);
  }
  return (bits & kSign) != 0 ? -size : size;
}

std::uint8_t f8_e4m3_from_real(double value) noexcept {
  const std::uint8_t sign = std::signbit(value) ? kSign : std::uint8_t{0};
  const double size = std::fabs(value);
  if (std::isnan(size)) {
    return sign | kNan;
  }
  if (size > 448) {
    return sign | kLargest;
  }
  const int exponent = size == 0 ? kLowestExponent : std::max(std::ilogb(size), kLowestExponent);
  // Eighths of the binade; the rest is dropped exactly, and then looked at.
  const double units = std::ldexp(size, kMantissaBits - exponent);
  auto whole = static_cast<unsigned>(units);
  const double rest = units - whole;
  if (rest > 0.5 || (rest == 0.5 && whole % 2 == 1)) {
    ++whole;
  }
  // A carry into the exponent is what adding does.
  const unsigned first = exponent == kLowestExponent
                             ? 0U
                             : static_cast<unsigned>(exponent - kLowestExponent) << kMantissaBits;
  return static_cast<std::uint8_t>(sign | (first + whole));
}

bool is_f8_e8m0(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  constexpr std::uint32_t kLowest = 0x400000;  // 2^-127, below the normal numbers
  const std::uint32_t exponent = bits >> 23;
  return bits == kLowest || (exponent >= 1 && exponent <= 254 && (bits & kF32Mantissa) == 0);
}

std::uint8_t f8_e8m0_from_f32(float value) noexcept {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value) >> 23);
}

float power_of_two_scale(float scale) {
  if (!(scale > 0) || !std::isfinite(scale)) {
    throw Error(Errc::bad_argument,
                "a scale is " + std::to_string(scale) + "; scales must be positive and finite");
  }
  int exponent = 0;
  const float fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
  exponent -= fraction == 0.5F ? 1 : 0;
  constexpr int kLeast = -127;
  constexpr int kMost = 127;
  if (exponent > kMost) {
    throw Error(Errc::bad_argument, "a scale is " + std::to_string(scale) +
                                        "; powers of two go up to 2^127 in f8_e8m0");
  }
  return std::ldexp(1.0F, std::max(exponent, kLeast));
}

void requantise_f8_e4m3(std::byte* weights, std::uint64_t count, float from, float to) {
  if (from == to) {
    return;
  }
  const auto anew = [&](unsigned bits) {
    // The product is exact in f64: 4 bits times 24.
    const double value = static_cast<double>(f32_from_f8_e4m3(static_cast<std::uint8_t>(bits))) *
                         static_cast<double>(from);
    return f8_e4m3_from_real(value / static_cast<double>(to));
  };
  std::array<std::byte, 256> table;
  for (unsigned bits = 0; bits < table.size(); ++bits) {
    table[bits] = std::byte{anew(bits)};
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    weights[i] = table[std::to_integer<std::size_t>(weights[i])];
  }
}

}  // namespace m2n
