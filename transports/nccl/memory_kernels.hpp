// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Kernels that make, change, compare, digest and copy values in device memory. Every launch
/// returns at once; errors are the runtime's.

#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor/digest.hpp"
#include "transports/nccl/task.hpp"

namespace m2n::nccl {

/// The elements of a box in device memory, numbered in row-major order.
struct ElementView {
  static constexpr int kMaxRank = 8;
  int rank = 0;
  std::uint32_t item_bytes = 1;
  std::uint64_t count = 0;        ///< Elements.
  std::uint64_t data = 0;         ///< Address of the first.
  std::uint64_t first_index = 0;  ///< Global row-major index of the first.
  std::uint64_t extents[kMaxRank] = {};
  std::uint64_t index_steps[kMaxRank] = {};
  std::int64_t byte_steps[kMaxRank] = {};
};

/// A box to digest; its elements are dealt out in chunks of kDigestChunk.
struct DigestTask {
  ElementView box;
  Convert convert = Convert::none;  ///< Before the digest.
  std::uint64_t first_chunk = 0;    ///< Of the task, in its table.
  std::uint64_t scales = 0;         ///< Of the first element, where they are quantised.
  std::int64_t scale_steps[ElementView::kMaxRank] = {};
};
constexpr std::uint64_t kDigestChunk = 1 << 14;

/// How a value follows from its index; see core/tensor/digest.hpp and core/tensor/changes.hpp.
struct ValueRule {
  FiniteRule finite;
  std::uint64_t seed = 0;
  std::uint64_t changeable = 0;
  std::uint64_t version = 0;
};

/// Result of a comparison, in device memory. Starts as {0, ~0}.
struct WrongWords {
  std::uint64_t count;
  std::uint64_t first;
};

/// A strided copy between device addresses.
struct CopyView {
  int rank = 0;
  std::uint32_t source_bytes = 1;  ///< Of an item: 1, 2, 4, 8, or 16 without a cast.
  std::uint32_t destination_bytes = 1;
  Convert convert = Convert::none;
  std::uint64_t count = 0;
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t extents[ElementView::kMaxRank] = {};
  std::int64_t source_steps[ElementView::kMaxRank] = {};
  std::int64_t destination_steps[ElementView::kMaxRank] = {};
  std::uint64_t scales = 0;  ///< Of the first item, where the copy quantises.
  std::int64_t scale_steps[ElementView::kMaxRank] = {};
};

/// A box of whole blocks whose scales are wanted. Dimensions are those of the box that are longer
/// than 1, the one with the smallest step last; thread blocks take scale after scale.
struct ScaleTask {
  int rank = 0;
  Convert convert = Convert::none;  ///< From the type of the elements.
  std::uint64_t first_scale = 0;    ///< Of the task, in its table.
  std::uint64_t data = 0;
  std::uint64_t scales = 0;
  std::uint64_t extents[ElementView::kMaxRank] = {};     ///< Elements.
  std::uint64_t blocks[ElementView::kMaxRank] = {};      ///< Elements of one.
  std::uint64_t counts[ElementView::kMaxRank] = {};      ///< Blocks.
  std::int64_t steps[ElementView::kMaxRank] = {};        ///< Bytes from element to element.
  std::int64_t scale_steps[ElementView::kMaxRank] = {};  ///< Bytes from scale to scale.
};

/// Loads every kernel of this file on the current device: the driver otherwise does so at the first
/// launch, and may then wait for all that runs.
void load_memory_kernels();

void launch_fill(const ElementView& box, const ValueRule& rule, cudaStream_t stream);
void launch_change(const ElementView& box, std::uint64_t changeable, std::uint64_t from,
                   std::uint64_t to, cudaStream_t stream);
/// @param convert  From the rule's type to the elements'.
void launch_compare(const ElementView& box, const ValueRule& rule, Convert convert,
                    WrongWords* wrong, cudaStream_t stream);
/// Adds each task's digest to its word of @p sums. Tables are in device memory.
void launch_digests(const DigestTask* tasks, std::uint64_t count, std::uint64_t chunks,
                    std::uint64_t* sums, cudaStream_t stream);
void launch_copy(const CopyView& copy, cudaStream_t stream);
/// Writes the scales of all tasks, @p scales in all. The table is in device memory.
void launch_block_scales(const ScaleTask* tasks, std::uint64_t count, std::uint64_t scales,
                         cudaStream_t stream);

}  // namespace m2n::nccl
