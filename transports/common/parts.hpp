// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Cuts regions into parts of bounded size, and gathers parts into chunks that travel as one
/// message. Nothing here depends on addresses, so both ranks of a pair cut alike.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/layout/layout.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

/// The regions of @p regions that have bytes, by the rank at @p end of them (the peer's), each list
/// in the order that both ranks of the pair share.
std::map<Rank, std::vector<const Region*>> by_peer(const std::vector<Region>& regions,
                                                   Endpoint Region::*end);

/// A part of a region: its first element lies so many bytes from the region's, on either side, and
/// so does its scale where the copy quantises.
struct Part {
  std::size_t region = 0;
  StridedCopy copy;
  std::int64_t source_offset = 0;
  std::int64_t destination_offset = 0;
  std::uint64_t staging_offset =
      0;                    ///< In the chunk; without meaning for parts that are not staged.
  std::uint64_t bytes = 0;  ///< At the destination's dtype.
  std::int64_t scale_offset = 0;
};

/// Bytes of @p copy at the destination's dtype.
std::uint64_t bytes_of_copy(const StridedCopy& copy);

/// True when the elements of @p piece lie row-major and without gaps.
bool is_compact(const Piece& piece);

/// True when @p copy is one run of equal bytes on both sides.
bool is_run(const StridedCopy& copy);

/// Cuts @p part along its outer dimensions until no part has more than @p limit bytes. A part
/// without bytes gives none. @pre @p limit is at least the size of an element.
void cut(const Part& part, std::uint64_t limit, std::vector<Part>& out);

/// The two halves of a staged copy: into, and out of, the row-major packed form at the
/// destination's dtype.
StridedCopy packed_at_destination(const StridedCopy& copy);
StridedCopy packed_at_source(const StridedCopy& copy);

/// Parts that travel as one message: [first, first + count) of the list they were cut into.
struct Chunk {
  std::size_t first = 0;
  std::size_t count = 0;
  std::uint64_t bytes = 0;  ///< Up to the end of the last part.
};

/// Cuts @p regions, in order, into chunks of at most @p chunk_bytes. Parts are appended to
/// @p parts; each starts at a multiple of 64 bytes of its chunk. Regions without bytes give none.
std::vector<Chunk> cut_into_chunks(std::span<const StridedCopy> regions, std::uint64_t chunk_bytes,
                                   std::vector<Part>& parts);

}  // namespace m2n
