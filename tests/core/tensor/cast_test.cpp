// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Casts against a slow reference: the nearest of all values of the smaller type.

#include <algorithm>
#include <bit>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

std::uint32_t bits_of_float(float value) { return std::bit_cast<std::uint32_t>(value); }

/// A 16-bit format by its definition in IEEE 754: sign, exponent, fraction.
class Format {
 public:
  explicit Format(int fraction_bits)
      : fraction_bits_(fraction_bits), bias_((1 << (14 - fraction_bits)) - 1) {
    for (std::uint16_t bits = 0; bits <= infinity(); ++bits) {
      values_.push_back(value(bits));
    }
  }

  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(0x8000 - (1 << fraction_bits_));
  }
  bool is_nan(std::uint16_t bits) const { return (bits & 0x7fff) > infinity(); }

  /// Of a finite pattern without its sign; infinity counts as the power of two in its place, which
  /// is what rounding to nearest sees.
  double value(std::uint16_t bits) const {
    const int exponent = bits >> fraction_bits_;
    const int fraction = bits & ((1 << fraction_bits_) - 1);
    return exponent == 0
               ? std::ldexp(fraction, 1 - bias_ - fraction_bits_)
               : std::ldexp(fraction + (1 << fraction_bits_), exponent - bias_ - fraction_bits_);
  }

  float decode(std::uint16_t bits) const {
    const std::uint16_t magnitude = bits & 0x7fff;
    const double positive =
        magnitude == infinity() ? std::numeric_limits<double>::infinity() : value(magnitude);
    return static_cast<float>(bits >= 0x8000 ? -positive : positive);
  }

  /// Nearest, ties to even, of a number that is not NaN.
  std::uint16_t encode(float number) const {
    const double magnitude = std::fabs(static_cast<double>(number));
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    std::size_t nearest = static_cast<std::size_t>(above - values_.begin());
    if (above == values_.end()) {
      nearest = infinity();
    } else if (above != values_.begin()) {
      const double up = *above - magnitude;
      const double down = magnitude - *(above - 1);
      nearest -= down < up || (down == up && nearest % 2 == 1) ? 1 : 0;
    }
    return static_cast<std::uint16_t>(nearest | (std::signbit(number) ? 0x8000U : 0U));
  }

 private:
  int fraction_bits_;
  int bias_;
  std::vector<double> values_;  ///< Ascending, by bit pattern.
};

struct HalfCase {
  DType dtype;
  int fraction_bits;
  std::uint16_t (*from_f32)(float) noexcept;
  float (*to_f32)(std::uint16_t) noexcept;
};
std::ostream& operator<<(std::ostream& os, const HalfCase& c) { return os << to_string(c.dtype); }

const std::vector<HalfCase> kHalves = {
    {DType::bf16, 7, &bf16_from_f32, &f32_from_bf16},
    {DType::f16, 10, &f16_from_f32, &f32_from_f16},
};

struct RoundingCase {
  std::uint32_t f32;
  std::uint16_t bf16;
  std::uint16_t f16;
};
std::ostream& operator<<(std::ostream& os, const RoundingCase& c) {
  return os << std::bit_cast<float>(c.f32);
}

const std::vector<RoundingCase> kRoundingCases = {
    {bits_of_float(0.0F), 0x0000, 0x0000},
    {bits_of_float(-0.0F), 0x8000, 0x8000},
    {bits_of_float(1.0F), 0x3f80, 0x3c00},
    {bits_of_float(-2.5F), 0xc020, 0xc100},
    {bits_of_float(3.14F), 0x4049, 0x4248},        // truncation gives 0x4048
    {bits_of_float(1e-8F), 0x322c, 0x0000},        // truncation gives 0x322b
    {bits_of_float(1.00390625F), 0x3f80, 0x3c04},  // a tie of bf16, to even
    {bits_of_float(1.01171875F), 0x3f82, 0x3c0c},  // a tie of bf16, to even
    {bits_of_float(6.82F), 0x40da, 0x46d2},        // 6.8125
    {bits_of_float(6.83F), 0x40db, 0x46d4},        // 6.84375
    {bits_of_float(6.84F), 0x40db, 0x46d7},
    {bits_of_float(65504.0F), 0x4780, 0x7bff},
    {bits_of_float(65519.996F), 0x4780, 0x7bff},
    {bits_of_float(65520.0F), 0x4780, 0x7c00},
    {bits_of_float(-1e38F), 0xfe96, 0xfc00},
    {0x7f7fffff, 0x7f80, 0x7c00},  // the largest f32 rounds to infinity
    {0x7f7f7fff, 0x7f7f, 0x7c00},
    {0x7f7f8000, 0x7f80, 0x7c00},
    {0x7f800000, 0x7f80, 0x7c00},
    {0xff800000, 0xff80, 0xfc00},
    {0x00000001, 0x0000, 0x0000},
    {0x00008000, 0x0000, 0x0000},  // half of the smallest bf16 subnormal, to even
    {0x00008001, 0x0001, 0x0000},
    {0x00010000, 0x0001, 0x0000},  // subnormals are kept
    {0x807f0000, 0x807f, 0x8000},
    {0x33000000, 0x3300, 0x0000},  // 2^-25: half of the smallest f16 subnormal, to even
    {0x33000001, 0x3300, 0x0001},
    {0x33800000, 0x3380, 0x0001},  // 2^-24
    {0x387fc000, 0x3880, 0x03ff},  // the largest f16 subnormal
    {0x387fe000, 0x3880, 0x0400},
    {0x7f800001, 0x7fc0, 0x7e00},  // NaN stays NaN; truncation gives infinity
    {0xff800001, 0xffc0, 0xfe00},
    {0x7fc00000, 0x7fc0, 0x7e00},
    {0x7fffffff, 0x7fff, 0x7fff},
    {0x7fa00000, 0x7fe0, 0x7f00},
};

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(cast)

BOOST_DATA_TEST_CASE(known_numbers_round_to_nearest_even, bdata::make(kRoundingCases), c) {
  BOOST_TEST(bf16_from_f32(std::bit_cast<float>(c.f32)) == c.bf16);
  BOOST_TEST(f16_from_f32(std::bit_cast<float>(c.f32)) == c.f16);
}

BOOST_DATA_TEST_CASE(all_patterns_decode_exactly_and_come_back, bdata::make(kHalves), half) {
  const Format format(half.fraction_bits);
  const std::uint32_t quiet = 1U << (half.fraction_bits - 1);
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float decoded = half.to_f32(bits);
    if (format.is_nan(bits)) {
      // Quieted; the sign and the payload on top of the fraction.
      const std::uint32_t fraction = (i & ((1U << half.fraction_bits) - 1)) | quiet;
      BOOST_TEST_REQUIRE(bits_of_float(decoded) == ((i & 0x8000) << 16 | 0x7f800000U |
                                                    fraction << (23 - half.fraction_bits)));
      BOOST_TEST_REQUIRE(half.from_f32(decoded) == (i | quiet));
    } else {
      BOOST_TEST_REQUIRE(bits_of_float(decoded) == bits_of_float(format.decode(bits)));
      BOOST_TEST_REQUIRE(half.from_f32(decoded) == bits);
    }
  }
}

BOOST_DATA_TEST_CASE(both_sides_of_every_rounding_boundary_are_right, bdata::make(kHalves), half) {
  const Format format(half.fraction_bits);
  const auto check = [&](std::uint32_t bits) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const float number = std::bit_cast<float>(bits | sign);
      BOOST_TEST_REQUIRE(half.from_f32(number) == format.encode(number), number);
    }
  };
  for (std::uint16_t bits = 0; bits < format.infinity(); ++bits) {
    const double here = format.value(bits);
    const double next = format.value(static_cast<std::uint16_t>(bits + 1));
    const double middle = here + (next - here) / 2;
    // The last of bf16 is 2^128, past f32.
    const bool last = next > static_cast<double>(std::numeric_limits<float>::max());
    for (const double at : {here, middle, last ? here : next}) {
      const std::uint32_t around = bits_of_float(static_cast<float>(at));
      BOOST_TEST_REQUIRE(static_cast<double>(std::bit_cast<float>(around)) == at);
      check(around);
      check(around + 1);
      check(around == 0 ? around : around - 1);
    }
  }
}

BOOST_DATA_TEST_CASE(random_numbers_round_like_the_reference, bdata::make(kHalves), half) {
  const Format format(half.fraction_bits);
  std::mt19937 random(4);
  for (int round = 0; round < 500'000; ++round) {
    const float number = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(number)) {
      BOOST_TEST_REQUIRE(half.from_f32(number) == format.encode(number), number);
    }
  }
}

BOOST_DATA_TEST_CASE(nan_stays_nan_with_its_sign_and_leading_payload, bdata::make(kHalves), half) {
  std::mt19937 random(5);
  const int dropped = 23 - half.fraction_bits;
  const std::uint32_t quiet = 1U << (half.fraction_bits - 1);
  for (std::uint32_t round = 0; round < 200'000; ++round) {
    // Each single payload bit, then anything.
    const std::uint32_t fraction =
        round < 23 ? 1U << round : static_cast<std::uint32_t>(random()) & 0x7fffffU;
    const std::uint32_t sign = round % 2;
    if (fraction == 0) {
      continue;
    }
    const float nan = std::bit_cast<float>(sign << 31 | 0x7f800000U | fraction);
    const std::uint32_t all_ones = 0x7fffU & ~((1U << half.fraction_bits) - 1);
    BOOST_TEST_REQUIRE(half.from_f32(nan) == (sign << 15 | all_ones | quiet | fraction >> dropped));
  }
}

BOOST_AUTO_TEST_CASE(between_the_two_halves_there_is_one_rounding) {
  const Format bf16(7);
  const Format f16(10);
  std::vector<std::uint16_t> all(0x10000);
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
  }
  std::vector<std::uint16_t> to_f16(all.size());
  std::vector<std::uint16_t> to_bf16(all.size());
  const auto bytes = [](auto& words) { return reinterpret_cast<std::byte*>(words.data()); };
  cast_elements(DType::bf16, bytes(all), DType::f16, bytes(to_f16), all.size());
  cast_elements(DType::f16, bytes(all), DType::bf16, bytes(to_bf16), all.size());
  for (const std::uint16_t bits : all) {
    const std::uint16_t sign = bits & 0x8000;
    BOOST_TEST_REQUIRE(to_f16[bits] == (bf16.is_nan(bits) ? sign | 0x7e00 | (bits & 0x7f) << 3
                                                          : f16.encode(bf16.decode(bits))));
    BOOST_TEST_REQUIRE(to_bf16[bits] == (f16.is_nan(bits) ? sign | 0x7fc0 | (bits & 0x3ff) >> 3
                                                          : bf16.encode(f16.decode(bits))));
  }
}

BOOST_AUTO_TEST_CASE(arrays_of_any_length_and_alignment_cast_like_single_numbers) {
  std::mt19937 random(6);
  std::vector<std::byte> source(1024);
  std::generate(source.begin(), source.end(), [&] { return std::byte(random()); });
  for (const HalfCase& half : kHalves) {
    for (std::uint64_t count = 0; count < 80; ++count) {
      for (std::size_t shift = 0; shift < 5; ++shift) {
        std::vector<std::byte> narrow(1024, std::byte{0xa5});
        std::vector<std::byte> wide(1024, std::byte{0xa5});
        std::vector<std::byte> expected_narrow = narrow;
        std::vector<std::byte> expected_wide = wide;
        for (std::uint64_t i = 0; i < count; ++i) {
          float number = 0;
          std::uint16_t bits = 0;
          std::memcpy(&number, &source[shift + 4 * i], sizeof number);
          std::memcpy(&bits, &source[shift + 2 * i], sizeof bits);
          const std::uint16_t down = half.from_f32(number);
          const float up = half.to_f32(bits);
          std::memcpy(&expected_narrow[3 + 2 * i], &down, sizeof down);
          std::memcpy(&expected_wide[3 + 4 * i], &up, sizeof up);
        }
        cast_elements(DType::f32, &source[shift], half.dtype, &narrow[3], count);
        cast_elements(half.dtype, &source[shift], DType::f32, &wide[3], count);
        BOOST_TEST_REQUIRE((narrow == expected_narrow), half << " x " << count);
        BOOST_TEST_REQUIRE((wide == expected_wide), half << " x " << count);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(equal_types_keep_every_bit_signalling_nan_included) {
  const std::uint32_t source[2] = {0x7f800001, 0xff800002};
  std::uint32_t copy[2] = {};
  cast_elements(DType::f32, reinterpret_cast<const std::byte*>(source), DType::f32,
                reinterpret_cast<std::byte*>(copy), 2);
  BOOST_TEST(copy == source, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(only_equal_types_and_f16_bf16_f32_have_casts) {
  const auto is_float = [](DType dtype) {
    return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32;
  };
  std::byte from_bytes[8] = {};
  std::byte to_bytes[8] = {};
  for (const DType from : all_dtypes()) {
    for (const DType to : all_dtypes()) {
      const bool expected = from == to || (is_float(from) && is_float(to));
      BOOST_TEST(can_cast(from, to) == expected, to_string(from) << " to " << to_string(to));
      if (!expected) {
        BOOST_CHECK_EXCEPTION(
            cast_elements(from, from_bytes, to, to_bytes, 1), Error, [&](const Error& e) {
              const std::string text = e.what();
              return e.code() == Errc::bad_argument && text.find(to_string(from)) != text.npos &&
                     text.find(to_string(to)) != text.npos;
            });
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
