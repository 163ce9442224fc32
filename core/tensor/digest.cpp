// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/digest.hpp"

#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "core/error.hpp"

namespace m2n {
namespace {

/// A run of elements along the last dimension.
struct Row {
  std::uint64_t index;  ///< Global row-major index of the first element; the others follow.
  std::uint64_t count;
  Index step_bytes;
};

/// Calls @p visit(row, data of its first element) for the rows of @p box.
template <class Byte, class Visit>
void for_each_row(const Shape& shape, const Box& box, std::uint64_t item_bytes, Byte* data,
                  const Strides& strides, const Visit& visit) {
  const std::size_t rank = shape.size();
  expects(strides.size() == rank, "a stride for each dimension of a box");
  if (!Box::whole(shape).contains(box)) {
    throw Error(Errc::bad_argument, "box " + to_string(box) + " of shape " + to_string(shape) +
                                        ", expected a box inside the shape");
  }
  if (box.empty() || element_count(shape) == 0) {
    return;
  }
  const auto item = static_cast<Index>(item_bytes);
  if (rank == 0) {
    visit(Row{0, 1, item}, data);
    return;
  }
  const Strides global = row_major(shape);
  const std::size_t last = rank - 1;
  Row row{0, static_cast<std::uint64_t>(box[last].size()), strides[last] * item};
  Dims at = box.lo;
  for (;;) {
    Index index = 0;
    Index offset = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      index += at[d] * global[d];
      offset += (at[d] - box.lo[d]) * strides[d];
    }
    row.index = static_cast<std::uint64_t>(index);
    visit(row, data + offset * item);
    std::size_t d = last;
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      --d;
      at[d] = box.lo[d];
    }
    if (d == 0) {
      return;
    }
  }
}

/// Calls @p with(T{}) for the unsigned type of @p item_bytes, so that loops know the size.
template <class With>
auto with_word(std::uint64_t item_bytes, const With& with) {
  switch (item_bytes) {
    case 1:
      return with(std::uint8_t{});
    case 2:
      return with(std::uint16_t{});
    case 4:
      return with(std::uint32_t{});
    default:
      return with(std::uint64_t{});
  }
}

template <class Word>
std::uint64_t digest_of_row(const Row& row, const std::byte* data, Index step_bytes) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < row.count; ++i) {
    Word bits;
    std::memcpy(&bits, data + static_cast<Index>(i) * step_bytes, sizeof bits);
    sum += digest_term(row.index + i, bits);
  }
  return sum;
}

constexpr std::uint64_t apply(const FiniteRule& rule, std::uint64_t random) noexcept {
  std::uint64_t bits = random >> rule.shift;
  bits &= ~((bits & rule.exponent) == rule.exponent ? rule.lowest : 0);
  bits &= ~((bits & rule.exponent2) == rule.exponent2 ? rule.lowest2 : 0);
  return bits == rule.nan ? 0 : bits;
}

constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) noexcept {
  return mix64(seed + (index + 1) * 0x9e3779b97f4a7c15ULL);
}

template <class Word>
void fill_row(const FiniteRule& finite, std::uint64_t seed, const Row& row, std::byte* data,
              Index step_bytes) {
  for (std::uint64_t i = 0; i < row.count; ++i) {
    const auto bits = static_cast<Word>(apply(finite, random_bits(seed, row.index + i)));
    std::memcpy(data + static_cast<Index>(i) * step_bytes, &bits, sizeof bits);
  }
}

}  // namespace

FiniteRule finite_rule(DType dtype) {
  FiniteRule finite{.shift = 64 - bits_of(dtype)};
  const auto field = [&](std::uint64_t exponent) {
    finite.exponent = exponent;
    finite.lowest = exponent & (~exponent + 1);
  };
  switch (dtype) {
    case DType::boolean:
      finite.shift = 63;
      break;
    case DType::f8_e5m2:
      field(0x7c);
      break;
    case DType::f8_e4m3:
      field(0x78);
      break;
    case DType::f8_e8m0:
      field(0xff);
      break;
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
      finite.nan = 0x80;
      break;
    case DType::f16:
      field(0x7c00);
      break;
    case DType::bf16:
      field(0x7f80);
      break;
    case DType::f32:
      field(0x7f800000);
      break;
    case DType::c64:
      field(0x7f800000);
      finite.exponent2 = finite.exponent << 32;
      finite.lowest2 = finite.lowest << 32;
      break;
    case DType::f64:
      field(0x7ff0000000000000);
      break;
    case DType::f4:  // every value of these is finite
    case DType::f6_e2m3:
    case DType::f6_e3m2:
    case DType::u8:
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      break;
  }
  return finite;
}

std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype, const std::byte* data,
                            const Strides& strides) {
  const std::uint64_t item_bytes = bytes_of(dtype);
  return with_word(item_bytes, [&](auto word) {
    using Word = decltype(word);
    std::uint64_t sum = 0;
    for_each_row(shape, box, item_bytes, data, strides, [&](const Row& row, const std::byte* at) {
      // The usual step as a constant: that loop vectorises.
      sum += row.step_bytes == sizeof(Word) ? digest_of_row<Word>(row, at, sizeof(Word))
                                            : digest_of_row<Word>(row, at, row.step_bytes);
    });
    return sum;
  });
}

std::uint64_t synthetic_seed(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

std::uint64_t synthetic_bits(DType dtype, std::uint64_t seed, std::uint64_t index) noexcept {
  return apply(finite_rule(dtype), random_bits(seed, index));
}

void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                    std::byte* data, const Strides& strides) {
  const std::uint64_t item_bytes = bytes_of(dtype);
  const FiniteRule finite = finite_rule(dtype);
  with_word(item_bytes, [&](auto word) {
    using Word = decltype(word);
    for_each_row(shape, box, item_bytes, data, strides, [&](const Row& row, std::byte* at) {
      row.step_bytes == sizeof(Word) ? fill_row<Word>(finite, seed, row, at, sizeof(Word))
                                     : fill_row<Word>(finite, seed, row, at, row.step_bytes);
    });
  });
}

}  // namespace m2n
