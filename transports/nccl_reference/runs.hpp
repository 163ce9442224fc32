// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Copies inside a device as lists of runs, and the kernel that does a list in one launch.

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/tensor/copy.hpp"

namespace m2n::nccl_reference {

/// Rows of contiguous bytes at a pitch.
struct Run {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t rows = 1;
  std::int64_t source_pitch = 0;
  std::int64_t destination_pitch = 0;
  std::uint64_t first_tile = 0;  ///< Of the run, in its list.
};

/// Bytes of a tile: a part of a row, or as many rows as fit.
constexpr std::uint64_t kTileBytes = 32 << 10;

/// [begin, begin + count) of a table, in so many tiles.
struct RunList {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
  std::uint64_t tiles = 0;
};

/// Appends the runs of @p copy to the list that ends @p runs. @pre Equal dtypes.
void append_runs(const StridedCopy& copy, std::uint64_t source, std::uint64_t destination,
                 std::vector<Run>& runs, RunList& list);

/// @param runs  The table, in device memory.
void launch_runs(const Run* runs, const RunList& list, cudaStream_t stream);

}  // namespace m2n::nccl_reference
