// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Turns regions between addresses into work for copy engines and for the list kernel. No CUDA
/// here.

#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/plan.hpp"
#include "transports/nccl/task.hpp"

namespace m2n::nccl {

/// @throws Error{bad_argument} where there is no cast.
Convert convert_of(DType from, DType to);

/// A region between two addresses of this process's view.
struct Placed {
  StridedCopy copy;  ///< Simplified.
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t scales = 0;  ///< Of a copy that quantises.

  std::uint64_t bytes() const;  ///< At the destination's dtype.
};

/// The tasks and loops of every list of a session: two arrays that go to the device once.
struct Tables {
  std::vector<Task> tasks;
  std::vector<Loop> loops;
};

/// Appends one list. Empty regions add nothing. @throws Error{bad_argument} when a pair of dtypes
/// has no cast.
ListSlice append_list(std::span<const Placed> regions, Tables& tables);

/// A copy that a copy engine does in one call: rows of contiguous bytes at a pitch.
struct EngineCopy {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t source_pitch = 0;
  std::uint64_t destination_pitch = 0;

  std::uint64_t bytes() const { return row_bytes * rows; }
  friend auto operator<=>(const EngineCopy&, const EngineCopy&) = default;
};

/// The measured model that divides a stage between copy engines and the list kernel. Engines move
/// faster while they move (397 against 371 GB/s on NVLink 4), but pause between two copies; the
/// kernel fills the pauses. So engines take the largest copies as long as the kernel keeps
/// @p gap_bytes for each of them; a copy of @p alone_bytes needs no filling.
struct EngineModel {
  std::uint64_t min_bytes = 256 << 10;   ///< Smallest copy that an engine gets.
  std::uint64_t min_row_bytes = 512;     ///< Smallest row of a pitched copy.
  std::uint64_t gap_bytes = 245'000;     ///< What a kernel moves in the pause after a copy.
  std::uint64_t alone_bytes = 16 << 20;  ///< From here on the pause does not matter.
  std::uint64_t max_copies = 1ULL << 32;
  /// What queueing costs the host: a run in a batch, and rows at a pitch. As long as all copies of
  /// a stage together take it at most @p host_us, they are free. Beyond, only those are queued that
  /// shorten the round by @p host_worth times their cost: 1 MB that an engine takes from the kernel
  /// saves @p saving_us_per_mb.
  double run_us = 0.55;
  double rows_us = 1.7;
  double host_us = 20'000;
  double host_worth = 8;
  double saving_us_per_mb = 0.177;
};

struct Division {
  std::vector<EngineCopy> engine;
  std::vector<Placed> list;
};

/// Joins regions that follow one another on both sides, whatever their order.
std::vector<Placed> merge_adjacent(std::vector<Placed> regions);

/// Joins contiguous regions of one size that lie at constant steps on both sides, as stacked
/// experts do, into regions of several rows. @pre As merge_adjacent() returns them.
std::vector<Placed> merge_equal_steps(std::vector<Placed> regions);

/// Divides @p regions, all to other devices, by the model.
Division divide(std::vector<Placed> regions, const EngineModel& model);

}  // namespace m2n::nccl
