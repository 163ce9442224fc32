// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The regions of one pair of ranks, in one direction, as chunks that are packed on one side and
/// unpacked on the other.

#include <span>
#include <vector>

#include "core/api/copy_queue.hpp"
#include "transports/common/parts.hpp"

namespace m2n {

/// A region, where its first element lies on this side, and where that element's scale does, where
/// this side sends a region that quantises.
struct PlacedRegion {
  StridedCopy copy;
  LocalBuffer view;
  LocalBuffer scales = {};
};

/// Both ranks of a pair add the same regions in the same stages, and get the same chunks.
class PackedPair {
 public:
  /// @param sending  The views are the source's, else the destination's.
  explicit PackedPair(bool sending) : sending_(sending) {}

  /// The next stage. Regions without bytes are allowed.
  void add_stage(std::span<const PlacedRegion> regions, std::uint64_t chunk_bytes);

  /// One past the last chunk of a stage.
  std::size_t stage_end(std::size_t stage) const { return stage_end_[stage]; }
  std::size_t stage_begin(std::size_t stage) const { return stage > 0 ? stage_end_[stage - 1] : 0; }
  std::size_t stage_of(std::size_t chunk) const;
  std::size_t chunk_count() const { return chunks_.size(); }
  std::uint64_t chunk_bytes(std::size_t chunk) const { return chunks_[chunk].bytes; }

  /// Between the views of a chunk, in host memory, and its packed form at @p staging.
  void pack(std::size_t chunk, std::byte* staging) const;
  void unpack(std::size_t chunk, const std::byte* staging, bool bypass_cache) const;

  /// The same of every chunk as lists of @p queue, for views in device memory. @return their
  /// numbers, [chunk].
  std::vector<CopyQueue::List> add_to(CopyQueue& queue) const;

 private:
  struct Step {
    StridedCopy copy;
    LocalBuffer view;
    std::uint64_t staging_offset;
    LocalBuffer scales;
  };

  std::span<const Step> steps_of(std::size_t chunk) const;

  bool sending_;
  std::vector<Step> steps_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> stage_end_;
};

}  // namespace m2n
