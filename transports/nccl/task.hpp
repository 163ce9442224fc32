// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the list kernel reads: plain values that host and device share.

#include <cstdint>

namespace m2n::nccl {

/// How the bytes of a task change on their way.
enum class Convert : std::uint16_t {
  none,
  f32_to_bf16,
  f32_to_f16,
  bf16_to_f32,
  bf16_to_f16,
  f16_to_f32,
  f16_to_bf16,
  // Under a scale a block: core/tensor/block_scales.hpp.
  f32_to_f8,
  bf16_to_f8,
  f16_to_f8,
};

/// One outer loop of a task, steps in bytes; that of the scales where the task quantises.
struct Loop {
  std::uint64_t extent = 1;
  std::int64_t source_step = 0;
  std::int64_t destination_step = 0;
  std::int64_t scale_step = 0;

  friend auto operator<=>(const Loop&, const Loop&) = default;
};

/// Rows of contiguous bytes between two addresses. A row is cut into units: 16-byte segments of the
/// destination, kCastUnit elements of a cast, or kQuantiseUnit of a task that quantises. All
/// elements of a row have one scale. Tiles of kTileUnits units are dealt to warps.
struct Task {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t first_tile = 0;  ///< Of the task, in its list.
  std::uint64_t row_bytes = 0;   ///< At the destination.
  std::uint64_t row_units = 0;
  std::uint64_t rows = 0;
  std::uint32_t first_loop = 0;  ///< In the table of loops, innermost first.
  std::uint16_t loop_count = 0;
  Convert convert = Convert::none;
  std::uint64_t scales = 0;  ///< Address of the first element's, where the task quantises.
};

constexpr std::uint64_t kTileUnits = 256;
constexpr std::uint64_t kCastUnit = 8;
constexpr std::uint64_t kQuantiseUnit = 16;

/// A list in the tables: tasks [begin, begin + count), dealt out as @p tiles tiles.
struct ListSlice {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
  std::uint64_t tiles = 0;
  bool quantises = false;  ///< Some of them.
};

/// A flag of the own control block that must reach round * stride + add.
struct Gate {
  std::uint32_t flag = 0;
  std::uint32_t add = 0;
};

/// A flag in a peer's control block that is set to round * stride + add.
struct Signal {
  std::uint64_t address = 0;
  std::uint64_t add = 0;
};

}  // namespace m2n::nccl
