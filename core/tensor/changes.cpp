// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/changes.hpp"

#include <cstring>

namespace m2n {

std::uint64_t changeable_bits(DType dtype) noexcept {
  switch (dtype) {
    case DType::boolean:
    case DType::f4:
    case DType::f6_e2m3:
    case DType::f6_e3m2:
    case DType::f8_e8m0:
      return 1;
    case DType::f8_e5m2:
    case DType::f8_e5m2fnuz:
      return 0x3;
    case DType::f8_e4m3:
    case DType::f8_e4m3fnuz:
      return 0x7;
    case DType::f16:
      return 0x3ff;
    case DType::bf16:
      return 0x7f;
    case DType::f32:
      return 0x7fffff;
    case DType::c64:
      return 0x007fffff007fffff;
    case DType::f64:
      return 0xfffffffffffff;
    case DType::u8:
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      return ~std::uint64_t{0};
  }
  return 0;
}

void change_values(const Shape& shape, const Box& box, DType dtype, std::uint64_t from,
                   std::uint64_t to, std::byte* data, const Strides& strides) {
  if (box.empty()) {
    return;
  }
  const auto item = static_cast<std::size_t>(bytes_of(dtype));
  const std::uint64_t changeable = changeable_bits(dtype);
  const Strides global = row_major(shape);
  Dims at = box.lo;
  for (;;) {
    Index index = 0;
    Index offset = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      index += at[d] * global[d];
      offset += (at[d] - box.lo[d]) * strides[d];
    }
    const auto row = box.rank() == 0 ? Index{1} : box[box.rank() - 1].size();
    const Index step = box.rank() == 0 ? 1 : strides[box.rank() - 1];
    for (Index i = 0; i < row; ++i) {
      std::byte* const element = data + (offset + i * step) * static_cast<Index>(item);
      const auto number = static_cast<std::uint64_t>(index + i);
      std::uint64_t bits = 0;
      std::memcpy(&bits, element, item);
      bits ^= changed_bits(changeable, from, number) ^ changed_bits(changeable, to, number);
      std::memcpy(element, &bits, item);
    }
    std::size_t d = box.rank() == 0 ? 0 : box.rank() - 1;
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      --d;
      at[d] = box.lo[d];
    }
    if (d == 0) {
      return;
    }
  }
}

}  // namespace m2n
