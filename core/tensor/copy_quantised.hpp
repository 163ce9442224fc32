// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The part of copy_region() that quantises.

#include <cstddef>
#include <vector>

#include "core/tensor/copy.hpp"

namespace m2n {

/// Line by line along the destination. @p simple is simplified, quantises, and is not empty.
void copy_quantised(const StridedCopy& simple, const std::byte* source, const std::byte* scales,
                    std::byte* destination);

/// A part of a box in which scales lie regularly, as a copy.
struct QuantisedPart {
  StridedCopy copy;         ///< Simplified.
  Index source_offset = 0;  ///< Elements from the box's first one, on either side.
  Index destination_offset = 0;
  Index scale_offset = 0;  ///< Scales from that of the tensor's first block.
};

/// @p box as parts that together quantise it. @param strides  In elements, one a dimension of the
/// box; those of the scales likewise.
std::vector<QuantisedPart> quantised_parts(const Box& box, DType from, const Strides& source,
                                           const Strides& destination, const Dims& blocks,
                                           const Strides& scales);

}  // namespace m2n
