// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_reference/runs.hpp"

#include <algorithm>

namespace m2n::nccl_reference {
namespace {

std::uint64_t tiles_of(const Run& run) {
  if (run.row_bytes >= kTileBytes) {
    return run.rows * ((run.row_bytes + kTileBytes - 1) / kTileBytes);
  }
  const std::uint64_t rows = std::max<std::uint64_t>(1, kTileBytes / run.row_bytes);
  return (run.rows + rows - 1) / rows;
}

}  // namespace

void append_runs(const StridedCopy& copy, std::uint64_t source, std::uint64_t destination,
                 std::vector<Run>& runs, RunList& list) {
  const StridedCopy simple = simplify(copy);
  if (element_count(simple.extents) == 0) {
    return;
  }
  const auto item = static_cast<std::int64_t>(simple.source_item_bytes());
  std::size_t outer = simple.extents.size();  // dimensions outside the run
  Run run;
  run.row_bytes = static_cast<std::uint64_t>(item);
  if (outer > 0 && simple.source_strides[outer - 1] == 1 &&
      simple.destination_strides[outer - 1] == 1) {
    run.row_bytes *= static_cast<std::uint64_t>(simple.extents[--outer]);
  }
  if (outer > 0) {
    --outer;
    run.rows = static_cast<std::uint64_t>(simple.extents[outer]);
    run.source_pitch = simple.source_strides[outer] * item;
    run.destination_pitch = simple.destination_strides[outer] * item;
  }
  Dims at = Dims::filled(outer, 0);
  for (;;) {
    std::int64_t source_step = 0;
    std::int64_t destination_step = 0;
    for (std::size_t d = 0; d < outer; ++d) {
      source_step += at[d] * simple.source_strides[d] * item;
      destination_step += at[d] * simple.destination_strides[d] * item;
    }
    run.source = source + static_cast<std::uint64_t>(source_step);
    run.destination = destination + static_cast<std::uint64_t>(destination_step);
    run.first_tile = list.tiles;
    runs.push_back(run);
    ++list.count;
    list.tiles += tiles_of(run);
    std::size_t d = outer;
    while (d > 0 && ++at[d - 1] == simple.extents[d - 1]) {
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

}  // namespace m2n::nccl_reference
