// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_reference/runs.hpp"

namespace m2n::nccl_reference {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kMostBlocks = 132 * 8;

/// Units of one type, of rows at a pitch. Four of them under way a thread.
template <class Unit>
__device__ void copy_units(const char* source, char* destination, std::uint64_t units_per_row,
                           std::uint64_t rows, std::int64_t source_pitch,
                           std::int64_t destination_pitch) {
  const std::uint64_t count = units_per_row * rows;
  const auto place = [&](std::uint64_t i, std::int64_t pitch) {
    return rows == 1 ? static_cast<std::int64_t>(i * sizeof(Unit))
                     : static_cast<std::int64_t>(i / units_per_row) * pitch +
                           static_cast<std::int64_t>(i % units_per_row * sizeof(Unit));
  };
  constexpr unsigned kDepth = 4;
  for (std::uint64_t base = threadIdx.x; base < count; base += kDepth * kThreads) {
    Unit held[kDepth];
#pragma unroll
    for (unsigned k = 0; k < kDepth; ++k) {
      const std::uint64_t i = base + k * kThreads;
      if (i < count) {
        held[k] = *reinterpret_cast<const Unit*>(source + place(i, source_pitch));
      }
    }
#pragma unroll
    for (unsigned k = 0; k < kDepth; ++k) {
      const std::uint64_t i = base + k * kThreads;
      if (i < count) {
        *reinterpret_cast<Unit*>(destination + place(i, destination_pitch)) = held[k];
      }
    }
  }
}

__device__ void copy_rows(const char* source, char* destination, std::uint64_t row_bytes,
                          std::uint64_t rows, std::int64_t source_pitch,
                          std::int64_t destination_pitch) {
  std::uint64_t bits = reinterpret_cast<std::uint64_t>(source) |
                       reinterpret_cast<std::uint64_t>(destination) | row_bytes;
  if (rows > 1) {
    bits |=
        static_cast<std::uint64_t>(source_pitch) | static_cast<std::uint64_t>(destination_pitch);
  }
  if (bits % 16 == 0) {
    copy_units<uint4>(source, destination, row_bytes / 16, rows, source_pitch, destination_pitch);
  } else if (bits % 8 == 0) {
    copy_units<uint2>(source, destination, row_bytes / 8, rows, source_pitch, destination_pitch);
  } else if (bits % 4 == 0) {
    copy_units<unsigned>(source, destination, row_bytes / 4, rows, source_pitch, destination_pitch);
  } else if (bits % 2 == 0) {
    copy_units<unsigned short>(source, destination, row_bytes / 2, rows, source_pitch,
                               destination_pitch);
  } else {
    copy_units<unsigned char>(source, destination, row_bytes, rows, source_pitch,
                              destination_pitch);
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_runs(const Run* runs, std::uint64_t count, std::uint64_t tiles) {
  for (std::uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    std::uint64_t low = 0;  // the last run that begins at or before the tile
    std::uint64_t high = count;
    while (high - low > 1) {
      const std::uint64_t middle = low + (high - low) / 2;
      if (runs[middle].first_tile <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Run run = runs[low];
    const std::uint64_t local = tile - run.first_tile;
    const char* source = reinterpret_cast<const char*>(run.source);
    char* destination = reinterpret_cast<char*>(run.destination);
    if (run.row_bytes >= kTileBytes) {
      const std::uint64_t parts = (run.row_bytes + kTileBytes - 1) / kTileBytes;
      const auto row = static_cast<std::int64_t>(local / parts);
      const std::uint64_t begin = local % parts * kTileBytes;
      const std::uint64_t bytes =
          run.row_bytes - begin < kTileBytes ? run.row_bytes - begin : kTileBytes;
      copy_rows(source + row * run.source_pitch + begin,
                destination + row * run.destination_pitch + begin, bytes, 1, 0, 0);
    } else {
      const std::uint64_t per_tile = kTileBytes / run.row_bytes;
      const std::uint64_t first = local * per_tile;
      const std::uint64_t rows = run.rows - first < per_tile ? run.rows - first : per_tile;
      copy_rows(source + static_cast<std::int64_t>(first) * run.source_pitch,
                destination + static_cast<std::int64_t>(first) * run.destination_pitch,
                run.row_bytes, rows, run.source_pitch, run.destination_pitch);
    }
  }
}

}  // namespace

void launch_runs(const Run* runs, const RunList& list, cudaStream_t stream) {
  if (list.count > 0) {
    const auto blocks = static_cast<unsigned>(list.tiles < kMostBlocks ? list.tiles : kMostBlocks);
    copy_runs<<<blocks, kThreads, 0, stream>>>(runs + list.begin, list.count, list.tiles);
  }
}

}  // namespace m2n::nccl_reference
