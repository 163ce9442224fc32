// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/block_scales.hpp"

#include <algorithm>
#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/copy_quantised.hpp"
#include "core/tensor/requantise.hpp"

namespace m2n {
namespace {

using Bytes = std::vector<std::byte>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float value_of(DType dtype, std::uint32_t bits) {
  switch (dtype) {
    case DType::bf16:
      return f32_from_bf16(static_cast<std::uint16_t>(bits));
    case DType::f16:
      return f32_from_f16(static_cast<std::uint16_t>(bits));
    default:
      return std::bit_cast<float>(bits);
  }
}

/// By the rule of requantise.hpp, which is tested by a search through all elements.
std::byte slowly(float value, float scale) {
  const float quotient = value / scale;
  return std::isnan(quotient) ? std::byte{0x7f} : std::byte{f8_e4m3_from_real(quotient)};
}

std::byte quantised(DType dtype, std::uint32_t bits, float scale) {
  std::byte out{};
  quantise_f8_e4m3(dtype, reinterpret_cast<const std::byte*>(&bits), scale, &out, 1);
  return out;
}

/// Compares without a million assertions.
struct Mismatches {
  std::uint64_t count = 0;
  void add(bool same) { count += same ? 0 : 1; }
};

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  Index between(Index low, Index high) {
    return low + static_cast<Index>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  std::uint64_t bits() { return random_(); }

  Strides strides(const Shape& extents, Index& elements) {
    std::vector<std::size_t> order(extents.size());
    for (std::size_t d = 0; d < order.size(); ++d) {
      order[d] = order.size() - 1 - d;
    }
    if (between(0, 1) == 1) {
      std::shuffle(order.begin(), order.end(), random_);
    }
    Strides strides = Dims::filled(extents.size(), 0);
    Index stride = between(0, 3) == 0 ? 2 : 1;
    for (const std::size_t d : order) {
      strides[d] = stride;
      stride = stride * extents[d] + between(0, 2);
    }
    elements = stride + 1;
    return strides;
  }

 private:
  std::mt19937_64 random_;
};

/// A value of any size, now and then zero of either sign, or below the normal numbers.
std::uint32_t some_bits(DType dtype, Draw& draw) {
  const auto sign = static_cast<std::uint32_t>(draw.between(0, 1));
  if (dtype == DType::f32) {
    if (draw.between(0, 15) == 0) {
      return sign << 31 | static_cast<std::uint32_t>(draw.between(0, 3));
    }
    return sign << 31 | static_cast<std::uint32_t>(draw.between(100, 140)) << 23 |
           static_cast<std::uint32_t>(draw.bits() & 0x7fffff);
  }
  if (draw.between(0, 15) == 0) {
    return sign << 15 | static_cast<std::uint32_t>(draw.between(0, 3));
  }
  return dtype == DType::bf16
             ? sign << 15 | static_cast<std::uint32_t>(draw.between(100, 140)) << 7 |
                   static_cast<std::uint32_t>(draw.bits() & 0x7f)
             : sign << 15 | static_cast<std::uint32_t>(draw.bits() & 0x7bff);
}

constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};

template <class Visit>
void each_index(const Shape& extents, const Visit& visit) {
  if (std::any_of(extents.begin(), extents.end(), [](Index e) { return e == 0; })) {
    return;
  }
  Dims at = Dims::filled(extents.size(), 0);
  for (bool more = true; more;) {
    visit(at);
    more = false;
    for (std::size_t d = extents.size(); d-- > 0 && !more;) {
      more = ++at[d] < extents[d];
      at[d] = more ? at[d] : 0;
    }
  }
}

Index dot(const Dims& at, const Strides& strides) {
  Index sum = 0;
  for (std::size_t d = 0; d < at.size(); ++d) {
    sum += at[d] * strides[d];
  }
  return sum;
}

/// A box of a tensor somewhere in memory, and the scales of all blocks of the tensor.
struct Case {
  Shape shape;
  Dims blocks;
  Box box;
  DType dtype = DType::f32;
  Strides strides;
  Strides scale_strides;
  Bytes elements;  ///< The first is that at box.lo.
  Bytes scales;    ///< The first is that of the tensor's first block.

  std::uint32_t bits(const Dims& local) const {
    std::uint32_t bits = 0;
    const auto item = static_cast<Index>(bytes_of(dtype));
    std::memcpy(&bits, elements.data() + dot(local, strides) * item,
                static_cast<std::size_t>(item));
    return bits;
  }
};

Case random_case(Draw& draw, bool whole_blocks) {
  Case c;
  const Index rank = draw.between(0, 4);
  for (Index d = 0; d < rank; ++d) {
    const Index extent = draw.between(1, 14);
    const Index block = draw.between(0, 2) == 0 ? 1 : draw.between(1, 6);
    Index low = draw.between(0, extent - 1);
    Index high = draw.between(low + 1, extent);
    if (whole_blocks) {
      low = low / block * block;
      high = std::min(extent, ceil_div(high, block) * block);
    }
    c.shape.push_back(extent);
    c.blocks.push_back(block);
    c.box.lo.push_back(low);
    c.box.hi.push_back(high);
  }
  c.dtype = kFloats[draw.between(0, 2)];
  Index count = 0;
  c.strides = draw.strides(c.box.extents(), count);
  const std::uint64_t item = bytes_of(c.dtype);
  c.elements.resize(static_cast<std::size_t>(count) * item);
  const bool zero = draw.between(0, 9) == 0;
  for (Index i = 0; i < count; ++i) {
    const std::uint32_t bits = zero ? 0 : some_bits(c.dtype, draw);
    std::memcpy(c.elements.data() + static_cast<std::uint64_t>(i) * item, &bits, item);
  }
  c.scale_strides = draw.strides(scale_shape(c.shape, c.blocks), count);
  c.scales.resize(static_cast<std::size_t>(count) * sizeof(float));
  for (Index i = 0; i < count; ++i) {
    const auto scale = static_cast<float>(draw.between(1, 1'000'000)) / 4096;
    std::memcpy(c.scales.data() + i * Index{sizeof scale}, &scale, sizeof scale);
  }
  return c;
}

Dims global_of(const Case& c, const Dims& local) {
  Dims at = local;
  for (std::size_t d = 0; d < at.size(); ++d) {
    at[d] += c.box.lo[d];
  }
  return at;
}

Dims block_of(const Case& c, const Dims& at) {
  Dims block = at;
  for (std::size_t d = 0; d < block.size(); ++d) {
    block[d] /= c.blocks[d];
  }
  return block;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(block_scales_of)

BOOST_AUTO_TEST_CASE(a_scale_is_the_largest_over_448_and_never_0) {
  BOOST_TEST(block_scale(448) == 1.0F);
  BOOST_TEST(block_scale(1) == 1.0F / 448.0F);
  BOOST_TEST(block_scale(0) == 1.0F);
  BOOST_TEST(block_scale(0x1p-149F) == 1.0F, "the quotient is 0");
  BOOST_TEST(block_scale(0x1p-140F) == 0x1p-149F, "the quotient is below the normal numbers");
  BOOST_TEST(block_scale(std::numeric_limits<float>::max()) ==
             std::numeric_limits<float>::max() / 448.0F);
  BOOST_TEST(block_scale(kInfinity) == kInfinity);
  for (const float nan : {kNan, -kNan}) {
    BOOST_TEST(std::bit_cast<std::uint32_t>(block_scale(nan)) == 0x7fc00000U);
  }
}

BOOST_AUTO_TEST_CASE(every_16_bit_value_becomes_the_nearest_element) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const float scale : {1.0F, 0.37F, 1000.0F, 0x1p-130F, kInfinity, kNan}) {
      Mismatches wrong;
      for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        wrong.add(quantised(dtype, bits, scale) == slowly(value_of(dtype, bits), scale));
      }
      BOOST_TEST(wrong.count == 0U, to_string(dtype) << " under " << scale);
    }
  }
}

BOOST_AUTO_TEST_CASE(f32_values_become_the_nearest_element_also_around_every_tie) {
  Mismatches wrong;
  const auto check = [&](float value, float scale) {
    wrong.add(quantised(DType::f32, std::bit_cast<std::uint32_t>(value), scale) ==
              slowly(value, scale));
  };
  for (unsigned bits = 0; bits < 0x7e; ++bits) {
    const float low = f32_from_f8_e4m3(static_cast<std::uint8_t>(bits));
    const float high = f32_from_f8_e4m3(static_cast<std::uint8_t>(bits + 1));
    const float tie = (low + high) / 2;
    for (const float at : {low, tie, high}) {
      for (const float value : {at, std::nextafter(at, 0.0F), std::nextafter(at, 500.0F)}) {
        check(value, 1);
        check(-value, 1);
      }
    }
  }
  for (const float value : {448.0F, 464.0F, 480.0F, 1e30F, kInfinity, kNan}) {
    check(value, 1);
    check(-value, 1);
  }
  Draw draw(3);
  for (int i = 0; i < 200'000; ++i) {
    check(std::bit_cast<float>(static_cast<std::uint32_t>(draw.bits())),
          static_cast<float>(draw.between(1, 1 << 20)) * 0x1p-18F);
  }
  BOOST_TEST(wrong.count == 0U);
  BOOST_TEST(std::to_integer<int>(quantised(DType::f32, 0x80000000U, 1)) == 0x80, "minus zero");
}

BOOST_AUTO_TEST_CASE(scales_of_random_boxes_are_those_of_a_look_at_every_element) {
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    Draw draw(seed);
    Case c = random_case(draw, true);
    BOOST_REQUIRE(holds_whole_blocks(c.box, c.shape, c.blocks));
    const Box held = scale_box(c.box, c.blocks);
    std::vector<float> largest(c.scales.size() / sizeof(float), 0);
    Bytes expected = c.scales;
    each_index(c.box.extents(), [&](const Dims& local) {
      const Index at = dot(block_of(c, global_of(c, local)), c.scale_strides);
      const float value = std::fabs(value_of(c.dtype, c.bits(local)));
      largest[static_cast<std::size_t>(at)] =
          std::max(largest[static_cast<std::size_t>(at)], value);
      float scale = largest[static_cast<std::size_t>(at)] / 448.0F;
      scale = scale == 0 ? 1 : scale;
      std::memcpy(expected.data() + at * Index{sizeof scale}, &scale, sizeof scale);
    });
    block_scales(c.box, c.blocks, c.dtype, c.elements.data(), c.strides,
                 c.scales.data() + dot(held.lo, c.scale_strides) * Index{sizeof(float)},
                 c.scale_strides);
    BOOST_REQUIRE_MESSAGE(c.scales == expected, "seed " << seed);
  }
}

BOOST_AUTO_TEST_CASE(what_is_not_finite_spoils_its_block_alone) {
  std::vector<float> values(16, 3);
  values[1] = kInfinity;
  values[6] = -kNan;
  values[7] = kInfinity;
  std::vector<float> scales(4);
  block_scales(Box::whole({16}), {4}, DType::f32, reinterpret_cast<const std::byte*>(values.data()),
               {1}, reinterpret_cast<std::byte*>(scales.data()), {1});
  BOOST_TEST(scales[0] == kInfinity);
  BOOST_TEST(std::isnan(scales[1]));
  BOOST_TEST(scales[2] == 3.0F / 448.0F);
  Bytes elements(16);
  copy_region({{4, 4}, {4, 1}, {4, 1}, DType::f32, DType::f8_e4m3, {1, 0}},
              reinterpret_cast<const std::byte*>(values.data()), elements.data(), false,
              reinterpret_cast<const std::byte*>(scales.data()));
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const float read = f32_from_f8_e4m3(std::to_integer<std::uint8_t>(elements[i])) * scales[i / 4];
    BOOST_TEST(std::isnan(read) == (i < 8), "element " << i);
  }
}

BOOST_AUTO_TEST_CASE(random_boxes_are_quantised_element_by_element_wherever_they_begin) {
  std::size_t most = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    Draw draw(seed);
    const Case c = random_case(draw, false);
    Index count = 0;
    const Strides strides = draw.strides(c.box.extents(), count);
    Bytes expected(static_cast<std::size_t>(count), std::byte{0xcd});
    Bytes found = expected;
    each_index(c.box.extents(), [&](const Dims& local) {
      float scale = 0;
      std::memcpy(&scale,
                  c.scales.data() +
                      dot(block_of(c, global_of(c, local)), c.scale_strides) * Index{sizeof scale},
                  sizeof scale);
      expected[static_cast<std::size_t>(dot(local, strides))] =
          slowly(value_of(c.dtype, c.bits(local)), scale);
    });
    const auto parts =
        quantised_parts(c.box, c.dtype, c.strides, strides, c.blocks, c.scale_strides);
    most = std::max(most, parts.size());
    for (const QuantisedPart& part : parts) {
      copy_region(part.copy,
                  c.elements.data() + part.source_offset * static_cast<Index>(bytes_of(c.dtype)),
                  found.data() + part.destination_offset, false,
                  c.scales.data() + part.scale_offset * Index{sizeof(float)});
    }
    BOOST_REQUIRE_MESSAGE(found == expected, "seed " << seed);
  }
  BOOST_TEST(most >= 9U, "heads, bodies and tails of two dimensions");
}

BOOST_AUTO_TEST_CASE(whole_rows_of_blocks_are_one_part_whose_rows_are_as_wide_as_a_block) {
  const Dims blocks{1, 128, 128};
  const auto parts =
      quantised_parts(Box{{0, 128, 256}, {4, 512, 1024}}, DType::bf16, {4096 * 512, 4096, 1},
                      {768 * 384, 768, 1}, blocks, {32 * 4, 32, 1});
  BOOST_REQUIRE(parts.size() == 1U);
  BOOST_TEST((parts[0].copy.extents == Shape{4, 3, 128, 6, 128}), to_string(parts[0].copy.extents));
  BOOST_TEST((parts[0].copy.scale_strides == Strides{128, 32, 0, 1, 0}),
             to_string(parts[0].copy.scale_strides));
  BOOST_TEST(parts[0].scale_offset == 32 + 2);
}

BOOST_AUTO_TEST_CASE(what_cannot_be_quantised_is_refused) {
  std::byte bytes[8] = {};
  BOOST_CHECK_EXCEPTION(
      quantise_f8_e4m3(DType::i64, bytes, 1, bytes, 1), Error, [](const Error& error) {
        return std::string(error.what()).find("from i64 to f8_e4m3") != std::string::npos;
      });
  BOOST_CHECK_THROW(block_scales(Box::whole({1}), {1}, DType::f8_e4m3, bytes, {1}, bytes, {1}),
                    Error);
  const StridedCopy without{{1}, {1}, {1}, DType::f32, DType::f8_e4m3, {}};
  BOOST_CHECK_THROW(simplify(without), Error);
  BOOST_CHECK_THROW(simplify({{1}, {1}, {1}, DType::f32, DType::bf16, {0}}), Error);
  BOOST_CHECK_THROW(
      copy_region({{2}, {1}, {1}, DType::f32, DType::f8_e4m3, {0}}, bytes, bytes, false, nullptr),
      Error);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
