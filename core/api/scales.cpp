// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/scales.hpp"

#include <map>

#include "core/error.hpp"
#include "core/plan/quantise.hpp"
#include "core/tensor/block_scales.hpp"

namespace m2n {

PlacedScales placed_scales(const Problem& problem, std::uint32_t parameter, Rank rank,
                           const Box& box, const std::vector<LocalBuffer>& source) {
  const std::uint32_t holder = problem.scales_of(parameter).value();
  const Dims& blocks = problem.parameters()[parameter].quantise->blocks;
  const Box held = scale_box(box, blocks);
  const Piece* const scales = scales_piece(*problem.parameters()[holder].source.layout, rank, held);
  expects(scales != nullptr, "a place for the scales of everything that a source holds");
  const View view = narrow(*scales, held, sizeof(float));
  const std::uint32_t buffer = problem.buffers(Role::source).of_parameter[holder][view.buffer];
  return {blocks, source[buffer].from(view.offset_bytes), view.strides};
}

void compute_scales(const Problem& problem, Rank rank, const std::vector<LocalBuffer>& source) {
  const BufferTable& table = problem.buffers(Role::source);
  std::map<MemorySpace, std::vector<ScalesOf>> by_space;
  for (std::uint32_t i = 0; i < problem.parameters().size(); ++i) {
    if (!problem.scales_of(i)) {
      continue;
    }
    const Parameter& parameter = problem.parameters()[i];
    for (const auto& [owner, piece] : parameter.source.layout->pieces_of(rank)) {
      const LocalBuffer& buffer = source[table.of_parameter[i][piece.view.buffer]];
      by_space[buffer.space].push_back({{parameter.shape, piece.box, parameter.source_dtype(),
                                         buffer.from(piece.view.offset_bytes), piece.view.strides},
                                        placed_scales(problem, i, owner, piece.box, source)});
    }
  }
  for (const auto& [space, boxes] : by_space) {
    memory_of(space).block_scales(boxes);
  }
}

}  // namespace m2n
