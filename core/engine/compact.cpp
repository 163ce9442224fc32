// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/compact.hpp"

#include <map>

#include "core/api/memory.hpp"

namespace m2n {

CompactTensor gather_compact(const Layout& layout, Rank rank,
                             const std::vector<LocalBuffer>& slots) {
  const DType dtype = layout.dtype();
  CompactTensor tensor{layout.compact(rank), {}};
  tensor.bytes.resize(static_cast<std::uint64_t>(element_count(tensor.shard.local_shape)) *
                      bytes_of(dtype));
  // A compact shard holds the same boxes, perhaps in another order; equal boxes keep theirs.
  std::multimap<Box, const View*> views;
  for (const RankPiece& entry : layout.pieces_of(rank)) {
    views.emplace(entry.piece.box, &entry.piece.view);
  }
  const LocalBuffer bytes = host_buffer(tensor.bytes.data(), tensor.bytes.size());
  for (const Piece& piece : tensor.shard.pieces) {
    const auto found = views.lower_bound(piece.box);
    const View& view = *found->second;
    copy_region({piece.box.extents(), view.strides, piece.view.strides, dtype, dtype},
                slots[view.buffer].from(view.offset_bytes), bytes.from(piece.view.offset_bytes));
    views.erase(found);
  }
  return tensor;
}

}  // namespace m2n
