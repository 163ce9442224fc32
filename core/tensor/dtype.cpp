// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/dtype.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/error.hpp"

namespace m2n {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  std::string_view safetensors;
  std::uint32_t bits;
};

constexpr std::array kRows{
    Entry{DType::boolean, "bool", "BOOL", 8},
    Entry{DType::f4, "f4", "F4", 4},
    Entry{DType::f6_e2m3, "f6_e2m3", "F6_E2M3", 6},
    Entry{DType::f6_e3m2, "f6_e3m2", "F6_E3M2", 6},
    Entry{DType::u8, "u8", "U8", 8},
    Entry{DType::i8, "i8", "I8", 8},
    Entry{DType::f8_e5m2, "f8_e5m2", "F8_E5M2", 8},
    Entry{DType::f8_e4m3, "f8_e4m3", "F8_E4M3", 8},
    Entry{DType::f8_e8m0, "f8_e8m0", "F8_E8M0", 8},
    Entry{DType::f8_e4m3fnuz, "f8_e4m3fnuz", "F8_E4M3FNUZ", 8},
    Entry{DType::f8_e5m2fnuz, "f8_e5m2fnuz", "F8_E5M2FNUZ", 8},
    Entry{DType::i16, "i16", "I16", 16},
    Entry{DType::u16, "u16", "U16", 16},
    Entry{DType::f16, "f16", "F16", 16},
    Entry{DType::bf16, "bf16", "BF16", 16},
    Entry{DType::i32, "i32", "I32", 32},
    Entry{DType::u32, "u32", "U32", 32},
    Entry{DType::f32, "f32", "F32", 32},
    Entry{DType::c64, "c64", "C64", 64},
    Entry{DType::f64, "f64", "F64", 64},
    Entry{DType::i64, "i64", "I64", 64},
    Entry{DType::u64, "u64", "U64", 64},
};

constexpr auto kAll = [] {
  std::array<DType, kRows.size()> all{};
  std::transform(kRows.begin(), kRows.end(), all.begin(),
                 [](const Entry& row) { return row.dtype; });
  return all;
}();

// Rows are found by position.
static_assert([] {
  for (std::size_t i = 0; i < kAll.size(); ++i) {
    if (static_cast<std::size_t>(kAll[i]) != i) {
      return false;
    }
  }
  return true;
}());

const Entry& row_of(DType dtype) {
  const auto i = static_cast<std::size_t>(dtype);
  expects(i < kRows.size(), "a dtype that exists");
  return kRows[i];
}

DType find(std::string_view name, std::string_view Entry::*column, const char* kind) {
  const auto row =
      std::find_if(kRows.begin(), kRows.end(), [&](const Entry& r) { return r.*column == name; });
  if (row != kRows.end()) {
    return row->dtype;
  }
  std::string text = std::string("no ") + kind + " '" + std::string(name) + "'; the names are ";
  for (const Entry& r : kRows) {
    text += std::string(&r == kRows.data() ? "" : ", ") + std::string(r.*column);
  }
  throw Error(Errc::bad_argument, text);
}

}  // namespace

std::span<const DType> all_dtypes() { return kAll; }

std::string_view to_string(DType dtype) { return row_of(dtype).name; }

std::string_view safetensors_name(DType dtype) { return row_of(dtype).safetensors; }

DType dtype_from_string(std::string_view name) { return find(name, &Entry::name, "dtype"); }

DType dtype_from_safetensors(std::string_view name) {
  return find(name, &Entry::safetensors, "safetensors dtype");
}

std::uint32_t bits_of(DType dtype) { return row_of(dtype).bits; }

bool is_byte_sized(DType dtype) { return bits_of(dtype) % 8 == 0; }

std::uint64_t bytes_of(DType dtype) {
  const Entry& row = row_of(dtype);
  if (row.bits % 8 != 0) {
    throw Error(Errc::bad_argument, "dtype " + std::string(row.name) + " has " +
                                        std::to_string(row.bits) +
                                        " bits an element, expected a type of whole bytes");
  }
  return row.bits / 8;
}

}  // namespace m2n
