// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/digests.hpp"

#include <algorithm>

#include "core/api/memory.hpp"

namespace m2n {

std::vector<HeldDigest> digests_of(const Problem& problem, Role role, Rank rank,
                                   const std::vector<LocalBuffer>& buffers) {
  std::vector<HeldDigest> out;
  std::vector<DigestOf> boxes;
  std::vector<std::size_t> owner;  // [box] its entry of out
  const BufferTable& table = problem.buffers(role);
  for (std::uint32_t i = 0; i < problem.parameters().size(); ++i) {
    const Parameter& parameter = problem.parameters()[i];
    const Layout& layout =
        *(role == Role::source ? parameter.source : parameter.destination).layout;
    const auto pieces = layout.pieces_of(rank);
    const bool gone = std::any_of(pieces.begin(), pieces.end(), [&](const RankPiece& entry) {
      return buffers[table.of_parameter[i][entry.piece.view.buffer]].data == nullptr;
    });
    if (pieces.empty() || gone) {
      continue;
    }
    out.push_back({i, 0});
    for (const RankPiece& entry : pieces) {
      const View& view = entry.piece.view;
      const LocalBuffer& buffer = buffers[table.of_parameter[i][view.buffer]];
      boxes.push_back({{parameter.shape, entry.piece.box, layout.dtype(),
                        buffer.from(view.offset_bytes), view.strides},
                       layout.dtype()});
      owner.push_back(out.size() - 1);
    }
  }
  const std::vector<std::uint64_t> sums = digests(boxes);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    out[owner[i]].digest += sums[i];
  }
  return out;
}

}  // namespace m2n
