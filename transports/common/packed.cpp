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
    // Strides may lead back, so a part need not lie behind the first element of its region.
    LocalBuffer view = regions[part.region].view;
    view.data += sending_ ? part.source_offset : part.destination_offset;
    LocalBuffer scales = regions[part.region].scales;
    if (scales.data != nullptr) {
      scales.data += part.scale_offset;
    }
    steps_.push_back({sending_ ? packed_at_destination(part.copy) : packed_at_source(part.copy),
                      view, part.staging_offset, scales});
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
    copy_region(step.copy, step.view.data, staging + step.staging_offset, false, step.scales.data);
  }
}

void PackedPair::unpack(std::size_t chunk, const std::byte* staging, bool bypass_cache) const {
  for (const Step& step : steps_of(chunk)) {
    copy_region(step.copy, staging + step.staging_offset, step.view.data, bypass_cache);
  }
}

std::vector<CopyQueue::List> PackedPair::add_to(CopyQueue& queue) const {
  std::vector<CopyQueue::List> lists;
  lists.reserve(chunks_.size());
  std::vector<StagedCopy> copies;
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    copies.clear();
    for (const Step& step : steps_of(chunk)) {
      copies.push_back({step.copy, step.view, step.staging_offset, step.scales});
    }
    lists.push_back(sending_ ? queue.add_pack(copies) : queue.add_unpack(copies));
  }
  return lists;
}

}  // namespace m2n
