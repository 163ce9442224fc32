// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Element types: every name that safetensors knows, with its size in bits.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace m2n {

/// In the ascending order of the safetensors writer (it sorts tensors by *descending* dtype).
/// f8_e4m3 is e4m3fn (no infinity, 448 is the largest value); f8_e8m0 is e8m0fnu.
enum class DType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

/// All types, in the order above.
std::span<const DType> all_dtypes();

/// Lower-case name, e.g. "bf16", "f8_e4m3", "bool": problem files, dumps, printed tables.
std::string_view to_string(DType dtype);
/// Name as in a safetensors header, e.g. "BF16".
std::string_view safetensors_name(DType dtype);

/// @throws Error{bad_argument} naming @p name and the names that exist. Case matters.
DType dtype_from_string(std::string_view name);
/// @throws Error{bad_argument} likewise, for the names of safetensors headers.
DType dtype_from_safetensors(std::string_view name);

/// Bits of one element: 4, 6, 8, 16, 32 or 64.
std::uint32_t bits_of(DType dtype);
/// False for the types that pack several elements into a byte (f4, f6_*).
bool is_byte_sized(DType dtype);
/// Bytes of one element. @throws Error{bad_argument} for a type that is not byte sized.
std::uint64_t bytes_of(DType dtype);

}  // namespace m2n
