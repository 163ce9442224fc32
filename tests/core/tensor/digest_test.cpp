// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Digests that do not depend on the layout, and synthetic values.

#include <algorithm>
#include <bit>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/digest.hpp"
#include "core/tensor/view.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;

/// Bits of one element, zero-extended. Little-endian, as everywhere in this project.
std::uint64_t load(const std::byte* data, std::uint64_t bytes) {
  std::uint64_t bits = 0;
  for (std::uint64_t i = 0; i < bytes; ++i) {
    bits |= std::uint64_t{std::to_integer<std::uint8_t>(data[i])} << (8 * i);
  }
  return bits;
}

/// Calls @p visit(global index, offset in elements from box.lo) for each element of @p box.
template <class Visit>
void for_each_element(const Shape& shape, const Box& box, const Strides& strides,
                      const Visit& visit) {
  const Strides global = row_major(shape);
  const Shape extents = box.extents();
  const Strides local = row_major(extents);
  for (Index i = 0; i < box.volume(); ++i) {
    Index index = 0;
    Index offset = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const Index at = i / local[d] % extents[d];
      index += (box.lo[d] + at) * global[d];
      offset += at * strides[d];
    }
    visit(static_cast<std::uint64_t>(index), offset);
  }
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  Index between(Index low, Index high) {
    return std::uniform_int_distribution<Index>(low, high)(random_);
  }
  std::byte byte() { return std::byte(random_()); }

  Shape shape() {
    Shape shape;
    for (Index d = between(0, 4); d > 0; --d) {
      shape.push_back(between(1, 7));
    }
    return shape;
  }

  /// Cuts @p box again and again into disjoint boxes that cover it.
  void cover(const Box& box, std::vector<Box>& out) {
    const std::size_t d =
        box.rank() == 0 ? 0 : static_cast<std::size_t>(between(0, 99)) % box.rank();
    if (box.rank() == 0 || box[d].size() < 2 || between(1, 4) == 1) {
      out.push_back(box);
      return;
    }
    const Index middle = between(box.lo[d], box.hi[d]);  // may leave an empty box
    Box low = box;
    Box high = box;
    low.hi[d] = middle;
    high.lo[d] = middle;
    cover(low, out);
    cover(high, out);
  }

  /// Strides of @p extents in any order of the dimensions, with gaps and reversals.
  Strides strides(const Shape& extents) {
    std::vector<std::size_t> order;
    for (std::size_t d = 0; d < extents.size(); ++d) {
      order.insert(order.begin() + between(0, static_cast<Index>(d)), d);
    }
    Strides strides = Dims::filled(extents.size(), 0);
    Index stride = between(1, 2);
    for (const std::size_t d : order) {
      strides[d] = between(1, 6) == 1 ? -stride : stride;
      stride = stride * std::max<Index>(extents[d], 1) + between(0, 1);
    }
    return strides;
  }

 private:
  std::mt19937_64 random_;
};

/// A buffer for @p extents with @p strides, and where its first element lies.
struct Local {
  std::vector<std::byte> bytes;
  std::byte* first = nullptr;

  Local(const Shape& extents, const Strides& strides, std::uint64_t item_bytes) {
    constexpr std::uint64_t kMiddle = std::uint64_t{1} << 30;
    const ByteSpan span = byte_span(extents, {0, kMiddle, strides}, item_bytes);
    const std::uint64_t below = span.end == 0 ? 0 : kMiddle - span.begin;
    bytes.resize(span.end == 0 ? 1 : span.end - span.begin + 1, std::byte{0x5a});
    first = bytes.data() + below + 1;  // never aligned by chance alone
  }
};

const std::vector<DType> kByteSized = [] {
  std::vector<DType> types;
  for (const DType dtype : all_dtypes()) {
    if (is_byte_sized(dtype)) {
      types.push_back(dtype);
    }
  }
  return types;
}();

struct Named {
  DType dtype;
};
std::ostream& operator<<(std::ostream& os, const Named& n) { return os << to_string(n.dtype); }

std::vector<Named> named(const std::vector<DType>& types) {
  std::vector<Named> all;
  for (const DType dtype : types) {
    all.push_back({dtype});
  }
  return all;
}

/// Finite by the definition of each type, not by the masks that made the value.
bool is_finite(DType dtype, std::uint64_t bits) {
  const auto byte = static_cast<std::uint8_t>(bits);
  switch (dtype) {
    case DType::f8_e4m3:
      return byte != 0x7f && byte != 0xff;
    case DType::f8_e5m2:
      return (byte & 0x7f) < 0x7c;
    case DType::f8_e8m0:
      return byte != 0xff;
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
      return byte != 0x80;
    case DType::f16:
      return std::isfinite(f32_from_f16(static_cast<std::uint16_t>(bits)));
    case DType::bf16:
      return std::isfinite(f32_from_bf16(static_cast<std::uint16_t>(bits)));
    case DType::f32:
      return std::isfinite(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    case DType::c64:
      return std::isfinite(std::bit_cast<float>(static_cast<std::uint32_t>(bits))) &&
             std::isfinite(std::bit_cast<float>(static_cast<std::uint32_t>(bits >> 32)));
    case DType::f64:
      return std::isfinite(std::bit_cast<double>(bits));
    case DType::boolean:
      return bits <= 1;
    default:
      return true;
  }
}

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(digest)

BOOST_AUTO_TEST_CASE(mix64_is_the_published_finaliser) {
  // The first outputs of SplitMix64 for the seeds 0 and 1234567.
  BOOST_TEST(mix64(kGolden) == 0xe220a8397b1dcdafU);
  BOOST_TEST(mix64(1'234'567 + kGolden) == 6'457'827'717'110'365'317U);
  BOOST_TEST(mix64(1'234'567 + 2 * kGolden) == 3'203'168'211'198'807'973U);
}

BOOST_AUTO_TEST_CASE(seeds_are_fnv_1a_of_the_name) {
  BOOST_TEST(synthetic_seed("") == 0xcbf29ce484222325U);
  BOOST_TEST(synthetic_seed("a") == 0xaf63dc4c8601ec8cU);
  BOOST_TEST(synthetic_seed("foobar") == 0x85944171f73967e8U);
}

BOOST_DATA_TEST_CASE(any_disjoint_cover_in_any_layout_adds_up_to_the_tensor,
                     bdata::make(named(kByteSized)), n) {
  const std::uint64_t item_bytes = bytes_of(n.dtype);
  Draw draw(100 + static_cast<std::uint64_t>(n.dtype));
  for (int round = 0; round < 100; ++round) {
    const Shape shape = draw.shape();
    std::vector<std::byte> tensor(static_cast<std::size_t>(element_count(shape)) * item_bytes);
    for (std::byte& byte : tensor) {
      byte = draw.byte();
    }
    std::uint64_t expected = 0;
    for (std::uint64_t i = 0; i * item_bytes < tensor.size(); ++i) {
      expected += mix64(mix64(i + 1) ^ load(&tensor[i * item_bytes], item_bytes));
    }
    BOOST_TEST_REQUIRE(digest_of_box(shape, Box::whole(shape), n.dtype, tensor.data(),
                                     row_major(shape)) == expected,
                       to_string(shape));

    std::vector<Box> boxes;
    draw.cover(Box::whole(shape), boxes);
    std::uint64_t sum = 0;
    for (const Box& box : boxes) {
      const Strides strides = draw.strides(box.extents());
      const Local local(box.extents(), strides, item_bytes);
      for_each_element(shape, box, strides, [&](std::uint64_t index, Index offset) {
        std::memcpy(local.first + offset * static_cast<Index>(item_bytes),
                    &tensor[index * item_bytes], item_bytes);
      });
      sum += digest_of_box(shape, box, n.dtype, local.first, strides);
    }
    BOOST_TEST_REQUIRE(sum == expected, to_string(shape) << " in " << boxes.size() << " boxes");
  }
}

BOOST_AUTO_TEST_CASE(swapped_and_changed_elements_change_the_digest) {
  std::vector<std::uint16_t> tensor(64);
  for (std::size_t i = 0; i < tensor.size(); ++i) {
    tensor[i] = static_cast<std::uint16_t>(i * 977);
  }
  const Shape shape{8, 8};
  const auto digest = [&] {
    return digest_of_box(shape, Box::whole(shape), DType::bf16,
                         reinterpret_cast<const std::byte*>(tensor.data()), row_major(shape));
  };
  const std::uint64_t before = digest();
  for (std::size_t i = 1; i < tensor.size(); ++i) {
    std::swap(tensor[0], tensor[i]);
    BOOST_TEST(digest() != before);
    std::swap(tensor[0], tensor[i]);
    tensor[i] ^= 1;
    BOOST_TEST(digest() != before);
    tensor[i] ^= 1;
  }
  BOOST_TEST(digest() == before);
}

BOOST_AUTO_TEST_CASE(empty_boxes_add_nothing_and_touch_no_memory) {
  BOOST_TEST(digest_of_box({4, 8}, {{4, 0}, {4, 8}}, DType::f32, nullptr, {8, 1}) == 0U);
  BOOST_TEST(digest_of_box({0, 8}, {{0, 0}, {0, 8}}, DType::f32, nullptr, {8, 1}) == 0U);
  fill_synthetic({4, 8}, {{0, 8}, {4, 8}}, DType::f32, 1, nullptr, {8, 1});
}

BOOST_AUTO_TEST_CASE(boxes_past_two_to_the_32_elements_use_their_true_index) {
  const std::uint16_t value = 0x3f80;
  const auto* data = reinterpret_cast<const std::byte*>(&value);
  const Shape shape{Index{1} << 20, Index{1} << 20};
  const Index last = (Index{1} << 20) - 1;
  BOOST_TEST(digest_of_box(shape, {{last, last}, {last + 1, last + 1}}, DType::bf16, data,
                           {1, 1}) == digest_term((std::uint64_t{1} << 40) - 1, value));
}

BOOST_AUTO_TEST_CASE(boxes_outside_the_shape_and_packed_types_are_refused) {
  std::byte data[64] = {};
  const auto is_bad_argument = [](const Error& e) { return e.code() == Errc::bad_argument; };
  BOOST_CHECK_EXCEPTION(digest_of_box({4}, {{2}, {5}}, DType::u8, data, {1}), Error,
                        is_bad_argument);
  BOOST_CHECK_EXCEPTION(digest_of_box({4}, {{0, 0}, {4, 1}}, DType::u8, data, {1}), Error,
                        is_bad_argument);
  BOOST_CHECK_EXCEPTION(digest_of_box({4}, {{0}, {4}}, DType::u8, data, {1, 1}), Error,
                        is_bad_argument);
  BOOST_CHECK_EXCEPTION(digest_of_box({4}, {{0}, {4}}, DType::f4, data, {1}), Error,
                        is_bad_argument);
  BOOST_CHECK_EXCEPTION(fill_synthetic({4}, {{0}, {4}}, DType::f6_e2m3, 1, data, {1}), Error,
                        is_bad_argument);
}

BOOST_AUTO_TEST_CASE(synthetic_values_are_finite_top_bits_of_the_mixed_index) {
  for (const DType dtype : all_dtypes()) {
    const std::uint32_t bits = bits_of(dtype);
    std::uint64_t changed = 0;
    for (std::uint64_t index = 0; index < 50'000; ++index) {
      const std::uint64_t random = mix64(77 + (index + 1) * kGolden);
      const std::uint64_t top = random >> (64 - (dtype == DType::boolean ? 1 : bits));
      const std::uint64_t value = synthetic_bits(dtype, 77, index);
      BOOST_TEST_REQUIRE(is_finite(dtype, value), to_string(dtype) << " " << index);
      BOOST_TEST_REQUIRE((bits == 64 || value >> bits == 0));
      // At most a bit of the exponent is cleared, or the only NaN becomes 0.
      BOOST_TEST_REQUIRE((value == top || (value & ~top) == 0), to_string(dtype));
      changed += value != top ? 1 : 0;
    }
    const bool may_change =
        dtype == DType::f8_e5m2 || dtype == DType::f8_e4m3 || dtype == DType::f8_e8m0 ||
        dtype == DType::f8_e4m3fnuz || dtype == DType::f8_e5m2fnuz || dtype == DType::f16 ||
        dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::c64 || dtype == DType::f64;
    BOOST_TEST((changed > 0) == may_change, to_string(dtype));
  }
}

struct ClearedCase {
  DType dtype;
  std::uint64_t special;   ///< An infinite or NaN pattern ...
  std::uint64_t expected;  ///< ... and what it becomes.
};
std::ostream& operator<<(std::ostream& os, const ClearedCase& c) {
  return os << to_string(c.dtype);
}

const std::vector<ClearedCase> kClearedCases = {
    {DType::f8_e5m2, 0x7c, 0x78},     {DType::f8_e4m3, 0x7f, 0x77},
    {DType::f8_e8m0, 0xff, 0xfe},     {DType::f8_e4m3fnuz, 0x80, 0x00},
    {DType::f8_e5m2fnuz, 0x80, 0x00}, {DType::f16, 0xfc00, 0xf800},
    {DType::bf16, 0x7f81, 0x7f01},
};

BOOST_DATA_TEST_CASE(special_patterns_lose_the_lowest_exponent_bit, bdata::make(kClearedCases), c) {
  // Some index draws the pattern: the types are small.
  const std::uint32_t shift = 64 - bits_of(c.dtype);
  std::uint64_t index = 0;
  while (mix64(9 + (index + 1) * kGolden) >> shift != c.special) {
    ++index;
  }
  BOOST_TEST(synthetic_bits(c.dtype, 9, index) == c.expected);
}

BOOST_AUTO_TEST_CASE(both_parts_of_a_complex_number_are_finite_apart) {
  std::uint64_t real = 0;
  std::uint64_t imaginary = 0;
  for (std::uint64_t index = 0; index < 20'000; ++index) {
    const std::uint64_t difference =
        synthetic_bits(DType::c64, 5, index) ^ mix64(5 + (index + 1) * kGolden);
    BOOST_TEST_REQUIRE((difference & ~0x0080000000800000U) == 0U);
    real += (difference & 0x00800000U) != 0 ? 1 : 0;
    imaginary += difference >> 32 != 0 ? 1 : 0;
  }
  BOOST_TEST(real > 0U);
  BOOST_TEST(imaginary > 0U);
}

BOOST_DATA_TEST_CASE(a_filled_box_holds_the_values_of_its_elements_and_nothing_else,
                     bdata::make(named(kByteSized)), n) {
  const std::uint64_t item_bytes = bytes_of(n.dtype);
  Draw draw(200 + static_cast<std::uint64_t>(n.dtype));
  for (int round = 0; round < 100; ++round) {
    const Shape shape = draw.shape();
    std::vector<Box> boxes;
    draw.cover(Box::whole(shape), boxes);
    for (const Box& box : boxes) {
      const Strides strides = draw.strides(box.extents());
      const Local local(box.extents(), strides, item_bytes);
      Local expected(box.extents(), strides, item_bytes);
      const Index item = static_cast<Index>(item_bytes);
      for_each_element(shape, box, strides, [&](std::uint64_t index, Index offset) {
        const std::uint64_t value = synthetic_bits(n.dtype, 31, index);
        for (Index b = 0; b < item; ++b) {
          expected.first[offset * item + b] = std::byte(value >> (8 * b));
        }
      });
      fill_synthetic(shape, box, n.dtype, 31, local.first, strides);
      BOOST_TEST_REQUIRE((local.bytes == expected.bytes), to_string(box));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
