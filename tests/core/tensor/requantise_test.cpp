// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/requantise.hpp"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/error.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

/// Every finite size that f8_e4m3 has, by its bits: written down from the format, not computed from
/// bits. Sixteen binades of eight; the first has no leading one, the last stops at 448.
std::vector<long double> all_sizes() {
  std::vector<long double> sizes;
  for (int eighth = 0; eighth < 8; ++eighth) {
    sizes.push_back(eighth / 512.0L);
  }
  for (long double binade = 1 / 64.0L; binade < 512; binade *= 2) {
    for (int eighth = 0; eighth < 8; ++eighth) {
      sizes.push_back(binade + binade * eighth / 8);
    }
  }
  sizes.pop_back();  // NaN
  return sizes;
}

/// The bits whose size is nearest: all are tried.
unsigned nearest(long double size) {
  static const std::vector<long double> kSizes = all_sizes();
  unsigned best = 0;
  for (unsigned bits = 1; bits < kSizes.size(); ++bits) {
    const long double now = std::fabs(kSizes[bits] - size);
    const long double before = std::fabs(kSizes[best] - size);
    if (now < before || (now == before && bits % 2 == 0)) {
      best = bits;
    }
  }
  return best;
}

std::byte slowly(std::byte weight, float from, float to) {
  const unsigned bits = std::to_integer<unsigned>(weight);
  const unsigned size = bits & 127;
  if (size == 127) {
    return weight;
  }
  return std::byte((bits & 128) | nearest(all_sizes()[size] * from / to));
}

std::vector<std::byte> all_weights() {
  std::vector<std::byte> weights;
  for (unsigned bits = 0; bits < 256; ++bits) {
    weights.push_back(std::byte{static_cast<std::uint8_t>(bits)});
  }
  return weights;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(requantise)

BOOST_AUTO_TEST_CASE(every_f8_e4m3_has_the_value_of_its_format) {
  const auto sizes = all_sizes();
  BOOST_TEST(sizes.size() == 127U);
  BOOST_TEST(sizes.back() == 448.0L);
  for (unsigned bits = 0; bits < 127; ++bits) {
    const auto low = static_cast<std::uint8_t>(bits);
    BOOST_TEST(f32_from_f8_e4m3(low) == static_cast<float>(sizes[bits]));
    BOOST_TEST(f32_from_f8_e4m3(low | 128) == -static_cast<float>(sizes[bits]));
    BOOST_TEST(f8_e4m3_from_real(static_cast<double>(sizes[bits])) == low);
    BOOST_TEST(f8_e4m3_from_real(-static_cast<double>(sizes[bits])) == (low | 128));
  }
  BOOST_TEST(std::isnan(f32_from_f8_e4m3(0x7f)));
  BOOST_TEST(std::isnan(f32_from_f8_e4m3(0xff)));
  BOOST_TEST(f8_e4m3_from_real(std::nan("")) == 0x7f);
}

/// Ties, carries into the next binade, what is too small and what is too large.
BOOST_AUTO_TEST_CASE(rounding_is_to_the_nearest_and_ties_to_even) {
  BOOST_TEST(f8_e4m3_from_real(1.0625) == 0x38);     // between 1 and 1.125: 1 is even
  BOOST_TEST(f8_e4m3_from_real(1.1875) == 0x3a);     // between 1.125 and 1.25
  BOOST_TEST(f8_e4m3_from_real(1.97) == 0x40);       // up to 2
  BOOST_TEST(f8_e4m3_from_real(0.0009765625) == 0);  // half of the smallest
  BOOST_TEST(f8_e4m3_from_real(0.001) == 1);
  BOOST_TEST(f8_e4m3_from_real(0.015) == 8);  // the smallest with a leading one
  BOOST_TEST(f8_e4m3_from_real(449) == 0x7e);
  BOOST_TEST(f8_e4m3_from_real(-1e300) == 0xfe);
  BOOST_TEST(f8_e4m3_from_real(-std::numeric_limits<double>::infinity()) == 0xfe);
}

const std::vector<std::pair<float, float>> kScales = {
    {1.0F, 4.0F}, {2.0F, 4.0F},     {4.0F, 4.0F}, {0.3F, 0.5F},    {0.7F, 1.0F},    {1.0F, 3.0F},
    {0.1F, 0.3F}, {1e-30F, 7e-30F}, {1.0F, 1e6F}, {0.9999F, 1.0F}, {1e-45F, 1e-44F}};

BOOST_AUTO_TEST_CASE(requantised_weights_are_those_of_a_search_through_all_elements) {
  std::vector<std::pair<float, float>> scales = kScales;
  std::mt19937 random(20);
  std::uniform_real_distribution<float> draw(0.001F, 1.0F);
  for (int i = 0; i < 40; ++i) {
    const float from = draw(random);
    scales.emplace_back(from, from / draw(random));
  }
  for (const auto& [from, to] : scales) {
    std::vector<std::byte> weights = all_weights();
    requantise_f8_e4m3(weights.data(), weights.size(), from, to);
    for (const std::byte weight : all_weights()) {
      const auto bits = std::to_integer<unsigned>(weight);
      BOOST_TEST(std::to_integer<unsigned>(weights[bits]) ==
                     std::to_integer<unsigned>(slowly(weight, from, to)),
                 bits << " from " << from << " to " << to);
    }
  }
}

/// A37: the values of the entry, and their bytes in f8_e8m0.
BOOST_AUTO_TEST_CASE(scales_become_the_power_of_two_that_is_not_less) {
  const std::vector<std::tuple<float, float, unsigned>> rows = {
      {0.3F, 0.5F, 126},
      {0.7F, 1.0F, 127},
      {1.0F, 1.0F, 127},
      {1.0000001F, 2.0F, 128},
      {0.5F, 0.5F, 126},
      {std::ldexp(1.0F, -127), std::ldexp(1.0F, -127), 0},
      {std::ldexp(1.0F, -140), std::ldexp(1.0F, -127), 0},
      {std::ldexp(1.0F, 127), std::ldexp(1.0F, 127), 254}};
  for (const auto& [scale, power, byte] : rows) {
    BOOST_TEST(power_of_two_scale(scale) == power);
    BOOST_TEST(is_f8_e8m0(power));
    BOOST_TEST(unsigned{f8_e8m0_from_f32(power)} == byte);
  }
  for (const float other :
       {0.3F, 0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::ldexp(1.0F, -128)}) {
    BOOST_TEST(!is_f8_e8m0(other));
  }
  for (const float wrong : {0.0F, -0.5F, std::nanf(""), std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::max()}) {
    BOOST_CHECK_THROW((void)power_of_two_scale(wrong), Error);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
