// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/common/parts.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kCacheLine = 64;

}  // namespace

std::map<Rank, std::vector<const Region*>> by_peer(const std::vector<Region>& regions,
                                                   Endpoint Region::*end) {
  std::map<Rank, std::vector<const Region*>> out;
  for (const Region& region : regions) {
    if (region.bytes > 0) {
      out[(region.*end).rank].push_back(&region);
    }
  }
  return out;
}

std::uint64_t bytes_of_copy(const StridedCopy& copy) {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(copy.extents)),
                           copy.destination_item_bytes());
}

bool is_compact(const Piece& piece) {
  const Shape extents = piece.box.extents();
  const Strides expected = row_major(extents);
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] > 1 && piece.view.strides[d] != expected[d]) {
      return false;
    }
  }
  return true;
}

bool is_run(const StridedCopy& copy) {
  return copy.source_dtype == copy.destination_dtype &&
         (copy.extents.empty() || (copy.extents.size() == 1 && copy.source_strides[0] == 1 &&
                                   copy.destination_strides[0] == 1));
}

void cut(const Part& part, std::uint64_t limit, std::vector<Part>& out) {
  if (part.bytes == 0) {
    return;
  }
  if (part.bytes <= limit || part.copy.extents.empty()) {
    out.push_back(part);
    return;
  }
  const Index outer = part.copy.extents[0];
  const std::uint64_t slice = part.bytes / static_cast<std::uint64_t>(outer);
  const Index step = std::max<Index>(1, static_cast<Index>(limit / slice));
  const auto source_item = static_cast<Index>(part.copy.source_item_bytes());
  const auto item = static_cast<Index>(part.copy.destination_item_bytes());
  for (Index begin = 0; begin < outer; begin += step) {
    Part piece = part;
    const Index count = std::min(step, outer - begin);
    piece.copy.extents[0] = count;
    piece.source_offset += begin * part.copy.source_strides[0] * source_item;
    piece.destination_offset += begin * part.copy.destination_strides[0] * item;
    if (part.copy.quantises()) {
      piece.scale_offset += begin * part.copy.scale_strides[0] * Index{sizeof(float)};
    }
    piece.bytes = slice * static_cast<std::uint64_t>(count);
    if (count == 1) {
      piece.copy = simplify(piece.copy);
      cut(piece, limit, out);
    } else {
      out.push_back(piece);
    }
  }
}

StridedCopy packed_at_destination(const StridedCopy& copy) {
  StridedCopy pack = copy;
  pack.destination_strides = row_major(copy.extents);
  return simplify(pack);
}

StridedCopy packed_at_source(const StridedCopy& copy) {
  StridedCopy unpack = copy;
  unpack.source_strides = row_major(copy.extents);
  unpack.source_dtype = copy.destination_dtype;
  unpack.scale_strides = {};
  return simplify(unpack);
}

std::vector<Chunk> cut_into_chunks(std::span<const StridedCopy> regions, std::uint64_t chunk_bytes,
                                   std::vector<Part>& parts) {
  expects(chunk_bytes >= kCacheLine, "chunks of at least 64 bytes");
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const std::size_t first = parts.size();
    cut({i, regions[i], 0, 0, 0, bytes_of_copy(regions[i]), 0}, chunk_bytes, parts);
    for (std::size_t at = first; at < parts.size(); ++at) {
      Part& part = parts[at];
      const std::uint64_t begin =
          chunks.empty() ? 0 : (chunks.back().bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
      if (chunks.empty() || begin + part.bytes > chunk_bytes) {
        chunks.push_back({at, 1, part.bytes});
        continue;
      }
      part.staging_offset = begin;
      ++chunks.back().count;
      chunks.back().bytes = begin + part.bytes;
    }
  }
  return chunks;
}

}  // namespace m2n
