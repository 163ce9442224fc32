// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Floats as f8_e4m3 under one f32 scale a block. The arithmetic is IEEE 754 binary32, each step
/// rounded to nearest, ties to even, subnormals kept, so that every processor gets the same bits:
///
///   scale   = max |value of the block| / 448, and 1 where that quotient is 0
///   element = f8_e4m3(value / scale), and value is element * scale again, about
///
/// The first quotient is that of DeepSeek-V3's checkpoints (448 is the largest f8_e4m3), the second
/// saturates at 448. A block with a NaN has the scale NaN (0x7fc00000), one with an infinity and no
/// NaN the scale infinity: either way all of the block is NaN when it is read. An element that is
/// NaN is 0x7f.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// True from f32, bf16 and f16 to f8_e4m3.
constexpr bool can_quantise(DType from, DType to) noexcept {
  return to == DType::f8_e4m3 && (from == DType::f32 || from == DType::bf16 || from == DType::f16);
}

/// The scale of a block whose largest magnitude is @p largest.
float block_scale(float largest) noexcept;

/// Quantises @p count contiguous elements under one scale; any alignment.
/// @throws Error{bad_argument} when can_quantise(from, f8_e4m3) is false.
void quantise_f8_e4m3(DType from, const std::byte* source, float scale, std::byte* destination,
                      std::uint64_t count);

/// Shape of the scales of a tensor of @p shape: one a block, blocks at the end may be cut short.
/// @param blocks  Extents of a block, one a dimension, positive.
Shape scale_shape(const Shape& shape, const Dims& blocks);
/// The scales of all blocks that @p box touches. @pre the box is not empty.
Box scale_box(const Box& box, const Dims& blocks);
/// Whether @p box begins and ends between blocks, or at the end of the tensor.
bool holds_whole_blocks(const Box& box, const Shape& shape, const Dims& blocks);

/// Writes the scales of the blocks of @p box, as f32. The box holds whole blocks (of its tensor).
/// @param data     Address of the element at box.lo, with @p strides in elements.
/// @param scales   Address of the scale of the first block, with @p scale_strides in scales.
/// @throws Error{bad_argument} when can_quantise(dtype, f8_e4m3) is false.
void block_scales(const Box& box, const Dims& blocks, DType dtype, const std::byte* data,
                  const Strides& strides, std::byte* scales, const Strides& scale_strides);

/// A part of a box in which scales lie regularly, cut into dimensions such that every one of them
/// has a stride in each operand: [R, C] becomes [R / br, br, C / bc, bc].
struct ScaledPart {
  Shape extents;
  Strides steps;        ///< In elements of the box's dimension @p dims[d].
  Dims dims;            ///< The dimension of the box that dimension d runs along.
  Dims offset;          ///< Of the part's first element from box.lo.
  Dims scale_offset;    ///< Of its scale from the scale at the tensor's origin.
  Strides scale_steps;  ///< In scales along @p dims[d]: 1 from block to block, 0 inside of one.
};

/// @p box cut where it begins or ends inside of blocks: up to three parts a dimension.
/// @pre the box's rank and the number of dimensions with blocks of more than one element add up to
/// at most kMaxRank.
std::vector<ScaledPart> scaled_parts(const Box& box, const Dims& blocks);

}  // namespace m2n
