// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Views: where a box of global elements lies in a local buffer.

#include <cstdint>

#include "core/tensor/shape.hpp"

namespace m2n {

/// Where a box lies: its first element at @p offset_bytes of a buffer, and from there one stride,
/// in elements, a dimension. The offset need not be a multiple of the element size.
struct View {
  std::uint32_t buffer = 0;  ///< Slot in the list of buffer names beside the layout.
  std::uint64_t offset_bytes = 0;
  Strides strides;

  friend auto operator<=>(const View&, const View&) = default;
};

/// "These global elements are here."
struct Piece {
  Box box;
  View view;

  friend auto operator<=>(const Piece&, const Piece&) = default;
};

/// Half-open range of buffer bytes that a view touches. Strides may be negative or zero.
struct ByteSpan {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Bytes touched by @p view over @p extents with elements of @p item_bytes; {0, 0} when empty.
/// @throws Error{bad_argument} when it starts before byte 0 or does not fit into 64 bits.
ByteSpan byte_span(const Shape& extents, const View& view, std::uint64_t item_bytes);

/// The view of the part @p inner of @p piece. @pre piece.box contains inner.
View narrow(const Piece& piece, const Box& inner, std::uint64_t item_bytes);

}  // namespace m2n
