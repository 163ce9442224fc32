// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/regions.hpp"

#include <utility>

#include "core/error.hpp"
#include "core/plan/quantise.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/copy_quantised.hpp"

namespace m2n {
namespace {

/// A holding's piece and dtype; scratch is row-major over its box.
std::pair<Piece, DType> piece_of(const Pattern& pattern, std::uint32_t holding) {
  const std::uint32_t sources = pattern.geometry.source_count();
  if (holding < sources) {
    return {pattern.geometry.source->pieces()[holding].piece, pattern.geometry.source->dtype()};
  }
  const DType dtype = pattern.geometry.destination->dtype();
  const std::uint32_t destinations = pattern.geometry.destination_count();
  if (holding < sources + destinations) {
    return {pattern.geometry.destination->pieces()[holding - sources].piece, dtype};
  }
  const ScratchPiece& scratch = pattern.scratch[holding - sources - destinations];
  return {{scratch.box, {0, scratch.offset_bytes, row_major(scratch.box.extents())}}, dtype};
}

/// @p whole cut into parts in which the scales of its elements lie regularly.
void append_scaled(const Region& whole, const Box& box, const View& from, const View& to,
                   const PatternScales& scales, std::vector<Region>& out) {
  const Piece* const held =
      scales_piece(*scales.layout, whole.from.rank, scale_box(box, scales.blocks));
  expects(held != nullptr, "scales of everything that a source holds, on the same rank");
  const Index first = element_offset(Dims::filled(box.rank(), 0), held->box.lo, held->view.strides);
  const auto moved = [](Endpoint end, Index elements, DType dtype) {
    end.offset_bytes += static_cast<std::uint64_t>(elements) * bytes_of(dtype);
    return end;
  };
  for (const QuantisedPart& part : quantised_parts(box, whole.copy.source_dtype, from.strides,
                                                   to.strides, scales.blocks, held->view.strides)) {
    Region region = whole;
    region.from = moved(whole.from, part.source_offset, part.copy.source_dtype);
    region.to = moved(whole.to, part.destination_offset, part.copy.destination_dtype);
    region.scales =
        moved({whole.from.rank, Role::source, held->view.buffer, held->view.offset_bytes},
              part.scale_offset - first, DType::f32);
    region.bytes = static_cast<std::uint64_t>(element_count(part.copy.extents)) *
                   part.copy.destination_item_bytes();
    region.copy = part.copy;
    out.push_back(region);
  }
}

}  // namespace

void append_regions(const Pattern& pattern, const Move& move, const PatternScales* scales,
                    std::vector<Region>& out) {
  const auto [from, from_dtype] = piece_of(pattern, move.from);
  const auto [to, to_dtype] = piece_of(pattern, move.to);
  const Box& box = pattern.boxes[move.box];
  const View from_view = narrow(from, box, bytes_of(from_dtype));
  const View to_view = narrow(to, box, bytes_of(to_dtype));
  Region region;
  region.stage = move.stage;
  region.from = {pattern.rank_of(move.from), pattern.role_of(move.from), from_view.buffer,
                 from_view.offset_bytes};
  region.to = {pattern.rank_of(move.to), pattern.role_of(move.to), to_view.buffer,
               to_view.offset_bytes};
  region.copy.source_dtype = from_dtype;
  region.copy.destination_dtype = to_dtype;
  if (region.copy.quantises()) {
    expects(scales != nullptr, "scales for a pattern that quantises");
    append_scaled(region, box, from_view, to_view, *scales, out);
    return;
  }
  region.copy = simplify({box.extents(), from_view.strides, to_view.strides, from_dtype, to_dtype});
  region.bytes = pattern.move_bytes(move);
  out.push_back(region);
}

}  // namespace m2n
