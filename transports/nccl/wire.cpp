// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/wire.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

constexpr std::uint64_t kAlign = 256;  // of parts and chunks in the staging area
constexpr std::uint64_t kSmallestChunk = 16 << 10;
/// A part is at most this fraction of a chunk, so that chunks fill up.
constexpr std::uint64_t kPartsPerChunk = 8;

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Fills step after step with messages of one kind.
class Filler {
 public:
  Filler(std::vector<PairStep>& steps, std::uint64_t limit) : steps_(steps), limit_(limit) {}

  /// The step that takes @p bytes more, and the bytes that are in it already.
  PairStep& step_for(std::uint64_t bytes) {
    if (used_ + bytes > limit_ && used_ > 0) {
      ++at_;
      used_ = 0;
    }
    if (at_ == steps_.size()) {
      steps_.emplace_back();
    }
    return steps_[at_];
  }
  std::uint64_t used() const { return used_; }
  std::uint64_t room() const { return used_ < limit_ ? limit_ - used_ : limit_; }
  void add(std::uint64_t bytes) { used_ += bytes; }

 private:
  std::vector<PairStep>& steps_;
  std::uint64_t limit_;
  std::size_t at_ = 0;
  std::uint64_t used_ = 0;
};

std::uint64_t moved(std::uint64_t address, std::int64_t offset) {
  return address + static_cast<std::uint64_t>(offset);
}

}  // namespace

std::uint64_t chunk_bytes_for(std::uint64_t staging_bytes, std::uint64_t peers) {
  const std::uint64_t share = staging_bytes / 2 / std::max<std::uint64_t>(1, peers);
  return std::max(kSmallestChunk, share / kAlign * kAlign);
}

std::uint64_t slot_bytes_for(std::size_t pairs, const WireLimits& limits) {
  return checked_mul_bytes(aligned(limits.chunk_bytes), pairs, "staging");
}

std::vector<PairStep> cut_pair(std::span<const StridedCopy> regions, const WireLimits& limits) {
  expects(limits.chunk_bytes >= kSmallestChunk && limits.direct_bytes > 0 && limits.step_bytes > 0,
          "chunks of at least 16 KiB");
  std::vector<PairStep> steps;
  Filler staged(steps, limits.chunk_bytes);
  Filler direct(steps, limits.step_bytes);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const StridedCopy& copy = regions[i];
    const std::uint64_t bytes = bytes_of_copy(copy);
    if (is_run(copy) && bytes >= limits.direct_bytes) {
      for (std::uint64_t begin = 0; begin < bytes;) {
        const std::uint64_t length = std::min(direct.room(), bytes - begin);
        PairStep& step = direct.step_for(length);
        const auto offset = static_cast<std::int64_t>(begin);
        step.direct.push_back({i, copy, offset, offset, 0, length, 0});
        direct.add(length);
        begin += length;
      }
      continue;
    }
    parts.clear();
    cut({i, copy, 0, 0, 0, bytes, 0}, limits.chunk_bytes / kPartsPerChunk, parts);
    for (Part& part : parts) {
      const std::uint64_t length = aligned(part.bytes);
      PairStep& step = staged.step_for(length);
      part.staging_offset = staged.used();
      staged.add(length);
      step.staged_bytes = staged.used();
      step.staged.push_back(part);
    }
  }
  return steps;
}

std::vector<WireStep> compile_wire(std::span<const PairRegions> sends,
                                   std::span<const PairRegions> receives, const WireLimits& limits,
                                   const Staging& staging, Tables& tables) {
  std::vector<WireStep> steps;
  std::vector<std::vector<Placed>> packs;
  std::vector<std::vector<Placed>> unpacks;
  std::size_t pair_index = 0;
  const auto add = [&](const PairRegions& pair, bool sending) {
    std::vector<StridedCopy> copies;
    copies.reserve(pair.regions.size());
    for (const Placed& region : pair.regions) {
      copies.push_back(region.copy);
    }
    const std::vector<PairStep> cut_steps = cut_pair(copies, limits);
    if (steps.size() < cut_steps.size()) {
      steps.resize(cut_steps.size());
      packs.resize(cut_steps.size());
      unpacks.resize(cut_steps.size());
    }
    for (std::size_t s = 0; s < cut_steps.size(); ++s) {
      const PairStep& step = cut_steps[s];
      const std::uint64_t chunk =
          staging.address + (s % 2) * staging.slot_bytes + pair_index * aligned(limits.chunk_bytes);
      std::vector<Message>& messages = sending ? steps[s].sends : steps[s].receives;
      if (step.staged_bytes > 0) {
        messages.push_back({pair.peer, chunk, step.staged_bytes});
      }
      for (const Part& part : step.staged) {
        const Placed& region = pair.regions[part.region];
        if (sending) {
          packs[s].push_back({packed_at_destination(part.copy),
                              moved(region.source, part.source_offset), chunk + part.staging_offset,
                              moved(region.scales, part.scale_offset)});
        } else {
          unpacks[s].push_back({packed_at_source(part.copy), chunk + part.staging_offset,
                                moved(region.destination, part.destination_offset), 0});
        }
      }
      for (const Part& part : step.direct) {
        const Placed& region = pair.regions[part.region];
        messages.push_back({pair.peer,
                            sending ? moved(region.source, part.source_offset)
                                    : moved(region.destination, part.destination_offset),
                            part.bytes});
      }
    }
    ++pair_index;
  };
  for (const PairRegions& pair : sends) {
    add(pair, true);
  }
  for (const PairRegions& pair : receives) {
    add(pair, false);
  }
  for (std::size_t s = 0; s < steps.size(); ++s) {
    steps[s].pack = append_list(packs[s], tables);
    steps[s].unpack = append_list(unpacks[s], tables);
  }
  return steps;
}

}  // namespace m2n::nccl
