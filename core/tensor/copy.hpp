// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Copies one strided region of host memory to another, with a cast where the types differ.

#include <cstddef>
#include <cstdint>

#include "core/tensor/block_scales.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// A box of elements between two strided views. Values only: addresses are given apart, so that
/// one region serves any pair of buffers.
struct StridedCopy {
  Shape extents;
  Strides source_strides;       ///< In elements; zero and negative strides are allowed.
  Strides destination_strides;  ///< In elements; must not map two elements to one address.
  DType source_dtype = DType::u8;
  DType destination_dtype = DType::u8;
  /// Of a copy that quantises, in f32 scales: zero along dimensions inside of a block.
  Strides scale_strides = {};

  /// Whether elements become f8_e4m3 under the scales of a third operand (see block_scales.hpp).
  bool quantises() const { return can_quantise(source_dtype, destination_dtype); }
  std::uint64_t source_item_bytes() const { return bytes_of(source_dtype); }
  std::uint64_t destination_item_bytes() const { return bytes_of(destination_dtype); }
};

/// The same copy with fewer dimensions: extents of 1 dropped, dimensions that are adjacent on both
/// sides, and in the scales of a copy that quantises, merged, the rest ordered so that the
/// destination's smallest stride is innermost. An empty region keeps one dimension of extent 0; a
/// single element has no dimension.
StridedCopy simplify(const StridedCopy& region);

/// Copies every element of @p region. Any alignment. The two sides must not overlap.
/// Contiguous rows move by memcpy, or past the caches when @p bypass_cache is set: worth it when
/// all the regions of one move together exceed the last-level cache, and then about twice as fast;
/// without effect on rows under 128 bytes and on casts. Equal item sizes of 1, 2, 4 and 8 bytes
/// have their own loops; different dtypes are cast (see cast.hpp), or quantised.
/// @param source,destination  Address of the region's first element.
/// @param scales  Of a copy that quantises: address of the first element's scale, any alignment.
/// @throws Error{bad_argument} when the dtypes differ and there is no cast between them.
void copy_region(const StridedCopy& region, const std::byte* source, std::byte* destination,
                 bool bypass_cache = false, const std::byte* scales = nullptr);

}  // namespace m2n
