// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/tensor/view.hpp"

#include <string>

#include "core/error.hpp"

namespace m2n {
namespace {

/// Distances in bytes: how far something reaches below and above a position.
struct Reach {
  std::uint64_t below = 0;
  std::uint64_t above = 0;
};

void extend(Reach& reach, Index steps, Index stride, std::uint64_t item_bytes) {
  const auto bits = static_cast<std::uint64_t>(stride);
  const std::uint64_t magnitude = stride < 0 ? 0 - bits : bits;
  const std::uint64_t bytes = checked_mul_bytes(
      checked_mul_bytes(static_cast<std::uint64_t>(steps), magnitude, "byte count of a view"),
      item_bytes, "byte count of a view");
  std::uint64_t& side = stride < 0 ? reach.below : reach.above;
  side = checked_add_bytes(side, bytes, "byte count of a view");
}

std::uint64_t minus_below(std::uint64_t position, std::uint64_t below) {
  if (below > position) {
    throw Error(Errc::bad_argument, "view reaches " + std::to_string(below) +
                                        " bytes below its offset " + std::to_string(position) +
                                        ", expected a view that starts at byte 0 or later");
  }
  return position - below;
}

}  // namespace

ByteSpan byte_span(const Shape& extents, const View& view, std::uint64_t item_bytes) {
  expects(extents.size() == view.strides.size(), "a stride for each dimension of a view");
  for (const Index extent : extents) {
    if (extent <= 0) {
      return {};
    }
  }
  Reach reach;
  for (std::size_t d = 0; d < extents.size(); ++d) {
    extend(reach, extents[d] - 1, view.strides[d], item_bytes);
  }
  const std::uint64_t past_last =
      checked_add_bytes(reach.above, item_bytes, "byte count of a view");
  return {minus_below(view.offset_bytes, reach.below),
          checked_add_bytes(view.offset_bytes, past_last, "end byte of a view")};
}

View narrow(const Piece& piece, const Box& inner, std::uint64_t item_bytes) {
  expects(piece.box.contains(inner), "a box inside the piece that it is narrowed from");
  View view = piece.view;
  if (inner.empty()) {
    return view;  // no element, hence no place; the corner may lie outside the buffer
  }
  Reach shift;
  for (std::size_t d = 0; d < inner.rank(); ++d) {
    extend(shift, inner.lo[d] - piece.box.lo[d], view.strides[d], item_bytes);
  }
  view.offset_bytes = minus_below(
      checked_add_bytes(view.offset_bytes, shift.above, "offset of a view"), shift.below);
  return view;
}

}  // namespace m2n
