// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/quantise.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/block_scales.hpp"

namespace m2n {
namespace {

[[noreturn]] void bad_quantised(const Parameter& parameter, const std::string& what) {
  throw Error(Errc::bad_argument, "parameter '" + parameter.name + "': " + what);
}

void check_blocks(const Parameter& parameter) {
  const Dims& blocks = parameter.quantise->blocks;
  if (blocks.size() != parameter.shape.size()) {
    bad_quantised(parameter, "blocks " + to_string(blocks) + " do not fit shape " +
                                 to_string(parameter.shape) + "; give one extent a dimension");
  }
  std::size_t dimensions = blocks.size();
  for (const Index extent : blocks) {
    if (extent < 1) {
      bad_quantised(parameter,
                    "blocks " + to_string(blocks) + " have an extent below 1; take 1 or more");
    }
    dimensions += extent > 1 ? 1 : 0;
  }
  if (dimensions > kMaxRank) {
    bad_quantised(parameter, "blocks " + to_string(blocks) + " cut it into " +
                                 std::to_string(dimensions) + " dimensions, and there may be " +
                                 std::to_string(kMaxRank));
  }
}

void check_scales(const Parameter& parameter, const Parameter& scales) {
  const std::string name = "'" + scales.name + "', which holds its scales, ";
  if (scales.quantise) {
    bad_quantised(parameter, name + "is quantised itself; scales travel as f32");
  }
  for (const DType dtype : {scales.source_dtype(), scales.destination_dtype()}) {
    if (dtype != DType::f32) {
      bad_quantised(parameter, name + "has dtype " + std::string(to_string(dtype)) +
                                   " on one side; scales are f32 on both");
    }
  }
  check_scale_shape(parameter, scales);
}

/// Every rank of the source keeps the scales of what it holds, and only those.
void check_places(const Parameter& parameter, const Parameter& scales) {
  const Layout& source = *parameter.source.layout;
  const Layout& kept = *scales.source.layout;
  const Dims& blocks = parameter.quantise->blocks;
  const auto on = [](Rank rank) { return " on source rank " + std::to_string(rank) + " "; };
  for (const auto& [rank, piece] : source.pieces()) {
    if (!holds_whole_blocks(piece.box, parameter.shape, blocks)) {
      bad_quantised(parameter, "box " + to_string(piece.box) + on(rank) +
                                   "begins or ends inside a block of " + to_string(blocks) +
                                   "; a source that quantises holds whole blocks");
    }
    const Box box = scale_box(piece.box, blocks);
    if (scales_piece(kept, rank, box) == nullptr) {
      bad_quantised(parameter, "box " + to_string(piece.box) + on(rank) + "has its scales in box " +
                                   to_string(box) + " of '" + scales.name +
                                   "', and the rank has no piece with all of that");
    }
  }
  for (const auto& [rank, piece] : kept.pieces()) {
    std::vector<Box> missing{piece.box};
    for (const RankPiece& held : source.pieces_of(rank)) {
      std::vector<Box> left;
      for (const Box& part : missing) {
        subtract(part, scale_box(held.piece.box, blocks), left);
      }
      missing = std::move(left);
    }
    if (!missing.empty()) {
      bad_quantised(parameter, "box " + to_string(missing.front()) + " of its scales, '" +
                                   scales.name + "'," + on(rank) +
                                   "is of blocks that the rank does not hold");
    }
  }
}

}  // namespace

void check_scale_shape(const Parameter& parameter, const Parameter& scales) {
  const Shape shape = scale_shape(parameter.shape, parameter.quantise->blocks);
  if (scales.shape != shape) {
    bad_quantised(parameter, "'" + scales.name + "', which holds its scales, has shape " +
                                 to_string(scales.shape) + "; blocks " +
                                 to_string(parameter.quantise->blocks) + " of shape " +
                                 to_string(parameter.shape) + " have " + to_string(shape));
  }
}

Layout scales_layout(const Layout& source, const Dims& blocks) {
  std::vector<RankPiece> pieces;
  std::uint64_t offset_bytes = 0;
  for (const auto& [rank, piece] : source.pieces()) {
    if (pieces.empty() || pieces.back().rank != rank) {
      offset_bytes = 0;
    }
    const Box box = scale_box(piece.box, blocks);
    pieces.push_back({rank, {box, {0, offset_bytes, row_major(box.extents())}}});
    offset_bytes += static_cast<std::uint64_t>(box.volume()) * sizeof(float);
  }
  return Layout::explicit_pieces(scale_shape(source.shape(), blocks), DType::f32, source.ranks(),
                                 std::move(pieces));
}

const Piece* scales_piece(const Layout& scales, Rank rank, const Box& box) {
  for (const RankPiece& entry : scales.pieces_of(rank)) {
    if (entry.piece.box.contains(box)) {
      return &entry.piece;
    }
  }
  return nullptr;
}

void check_quantised(const Parameter& parameter, const Parameter* scales) {
  if (!can_quantise(parameter.source_dtype(), parameter.destination_dtype())) {
    bad_quantised(parameter, "the source has dtype " +
                                 std::string(to_string(parameter.source_dtype())) +
                                 " and the destination " +
                                 std::string(to_string(parameter.destination_dtype())) +
                                 "; quantising makes f8_e4m3 of f32, bf16 or f16");
  }
  check_blocks(parameter);
  if (scales == nullptr || scales == &parameter) {
    bad_quantised(parameter, "its scales are '" + parameter.quantise->scales +
                                 "', which is no other parameter; name the one that holds them");
  }
  check_scales(parameter, *scales);
  check_places(parameter, *scales);
}

}  // namespace m2n
