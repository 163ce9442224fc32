// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/common/packed.hpp"

#include <algorithm>

namespace m2n {

void PackedPair::add_stage(std::span<const PlacedRegion> regions, std::uint64_t chunk_bytes) {
  std::vector<StridedCopy> copies;
  copies.reserve(regions.size());
  for (const PlacedRegion& region : regions) {
    copies.push_back(region.copy);
  }
  std::vector<Part> parts;
  for (Chunk chunk : cut_into_chunks(copies, chunk_bytes, parts)) {
    chunk.first += steps_.size();
    chunks_.push_back(chunk);
  }
  for (const Part& part : parts) {
    steps_.push_back(
        {sending_ ? packed_at_destination(part.copy) : packed_at_source(part.copy),
         regions[part.region].view + (sending_ ? part.source_offset : part.destination_offset),
         part.staging_offset});
  }
  stage_end_.push_back(chunks_.size());
}

std::size_t PackedPair::stage_of(std::size_t chunk) const {
  const auto stage = std::upper_bound(stage_end_.begin(), stage_end_.end(), chunk);
  return static_cast<std::size_t>(stage - stage_end_.begin());
}

std::span<const PackedPair::Step> PackedPair::steps_of(std::size_t chunk) const {
  return std::span(steps_).subspan(chunks_[chunk].first, chunks_[chunk].count);
}

void PackedPair::pack(std::size_t chunk, std::byte* staging) const {
  for (const Step& step : steps_of(chunk)) {
    copy_region(step.copy, step.view, staging + step.staging_offset);
  }
}

void PackedPair::unpack(std::size_t chunk, const std::byte* staging, bool bypass_cache) const {
  for (const Step& step : steps_of(chunk)) {
    copy_region(step.copy, staging + step.staging_offset, step.view, bypass_cache);
  }
}

}  // namespace m2n
