// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Copies of many regions at once, listed beforehand: between a device's memory and staging in host
/// memory, and inside of a device.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/api/buffers.hpp"
#include "core/tensor/copy.hpp"

namespace m2n {

/// A region between a buffer and staging.
struct StagedCopy {
  StridedCopy copy;                ///< The staging's side is row-major.
  LocalBuffer at;                  ///< Starts with the region's first element.
  std::uint64_t offset_bytes = 0;  ///< Of the first element, in the staging.
  LocalBuffer scales = {};         ///< Of a pack that quantises: the first element's.

  std::uint64_t staged_bytes(bool pack) const;
};

/// A region between two buffers of one rank.
struct PlacedCopy {
  StridedCopy copy;
  LocalBuffer from;  ///< Both start with the region's first element.
  LocalBuffer to;
  LocalBuffer scales = {};  ///< Of a copy that quantises: the first element's.
};

/// Runs lists of copies, one after the other or several at a time.
///
/// Order of calls: add_*() for every list, then compile() once, then run() any number of times.
///
/// - Threads: one at a time, any thread.
/// - Memory: buffers and staging are the caller's, until a run over them is done. A queue keeps
///   extra_bytes() of its own, bounded by the largest list. A run allocates nothing.
/// - Streams: as Memory. Two runs that touch the same bytes are apart only when the first is done
///   before the second begins.
/// - Errors: Error when the device fails.
class CopyQueue {
 public:
  using List = std::size_t;
  using Ticket = std::uint64_t;

  CopyQueue() = default;
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  /// Waits for the runs under way.
  virtual ~CopyQueue() = default;

  /// From buffers to staging, and the other way round. Copies of a list do not overlap; bytes of
  /// the staging between them may be written, too.
  virtual List add_pack(std::span<const StagedCopy> copies) = 0;
  virtual List add_unpack(std::span<const StagedCopy> copies) = 0;
  virtual List add_copies(std::span<const PlacedCopy> copies) = 0;
  virtual void compile() = 0;

  /// Begins a list. @param staging  What offsets count from; of no meaning for add_copies().
  virtual Ticket run(List list, std::byte* staging) = 0;
  /// Whether a run is over. A look at the device, without waiting.
  virtual bool is_done(Ticket ticket) = 0;
  /// Waits for every run.
  virtual void finish() = 0;

  /// Of device memory, beside the buffers.
  virtual std::uint64_t extra_bytes() const noexcept { return 0; }
};

/// A queue of copies by Memory::copy(), each done when run() returns: for memories that know no
/// better.
std::unique_ptr<CopyQueue> make_plain_copy_queue();

}  // namespace m2n
