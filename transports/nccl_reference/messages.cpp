// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Schedules of messages: see schedule.hpp.

#include <algorithm>
#include <tuple>

#include "core/error.hpp"
#include "transports/common/parts.hpp"
#include "transports/nccl_reference/schedule.hpp"

namespace m2n::nccl_reference {
namespace {

Place place_of(const Endpoint& end) {
  switch (end.role) {
    case Role::source:
      return {Area::source, end.buffer, end.offset_bytes};
    case Role::destination:
      return {Area::destination, end.buffer, end.offset_bytes};
    case Role::scratch:
      break;
  }
  return {Area::scratch, 0, end.offset_bytes};
}

/// True when the elements lie in one run in row-major order of the extents.
bool is_run_of(const Shape& extents, const Strides& strides) {
  return strides == row_major(extents);
}

/// A region in the order that all ranks share. Pairs keep their own order.
struct Entry {
  const Region* region = nullptr;
  std::size_t number = 0;  ///< In the pair.

  auto key(bool call_per_region) const {
    const Region& r = *region;
    return std::tuple(r.stage, r.parameter, call_per_region ? r.from.rank : Rank{0},
                      call_per_region ? r.to.rank : Rank{0}, call_per_region ? number : 0);
  }
};

class Messages {
 public:
  Messages(const Program& program, bool call_per_region)
      : program_(program), call_per_region_(call_per_region) {}

  Schedule make() && {
    out_.scratch_bytes = program_.scratch_bytes;
    std::vector<Entry> entries;
    list(program_.sends, entries);
    list(program_.receives, entries);
    list(program_.copies, entries);
    std::stable_sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) {
      return a.key(call_per_region_) < b.key(call_per_region_);
    });
    for (std::size_t begin = 0; begin < entries.size();) {
      std::size_t end = begin + 1;
      while (end < entries.size() &&
             entries[end].key(call_per_region_) == entries[begin].key(call_per_region_)) {
        ++end;
      }
      add_step({entries.data() + begin, end - begin});
      begin = end;
    }
    return std::move(out_);
  }

 private:
  void list(const std::vector<Region>& regions, std::vector<Entry>& out) {
    std::map<std::pair<Rank, Rank>, std::size_t> number;
    for (const Region& region : regions) {
      if (region.copy.source_dtype != region.copy.destination_dtype) {
        throw Error(Errc::unavailable,
                    "transport 'nccl_reference' does not cast, and parameter " +
                        std::to_string(region.parameter) + " goes from " +
                        std::string(to_string(region.copy.source_dtype)) + " to " +
                        std::string(to_string(region.copy.destination_dtype)) +
                        ", expected one dtype on both sides; transport 'nccl' casts");
      }
      const std::size_t n = number[{region.from.rank, region.to.rank}]++;
      if (region.bytes > 0) {
        out.push_back({&region, n});
      }
    }
  }

  void add_step(std::span<const Entry> entries) {
    Step step;
    const std::uint32_t stage = entries.front().region->stage;
    step.barrier = stage != stage_;
    stage_ = stage;
    std::uint64_t outgoing = 0;
    std::uint64_t incoming = 0;
    for (const Entry& entry : entries) {
      const Region& r = *entry.region;
      const Rank me = program_.rank;
      if (r.from.rank == me && r.to.rank == me) {
        step.unpack.push_back({r.copy, place_of(r.from), place_of(r.to)});
        out_.copied_bytes += r.bytes;
        continue;
      }
      out_.traffic[{r.from.rank, r.to.rank}] += r.bytes;
      if (r.from.rank == me) {
        Place at = place_of(r.from);
        if (!is_run_of(r.copy.extents, r.copy.source_strides)) {
          step.pack.push_back({packed_at_destination(r.copy), at, {Area::outgoing, 0, outgoing}});
          at = step.pack.back().to;
          outgoing += aligned(r.bytes);
        }
        step.sends.push_back({r.to.rank, at, r.bytes});
      } else {
        Place at = place_of(r.to);
        if (!is_run_of(r.copy.extents, r.copy.destination_strides)) {
          step.unpack.push_back({packed_at_source(r.copy), {Area::incoming, 0, incoming}, at});
          at = step.unpack.back().from;
          incoming += aligned(r.bytes);
        }
        step.receives.push_back({r.from.rank, at, r.bytes});
      }
    }
    out_.outgoing_bytes = std::max(out_.outgoing_bytes, outgoing);
    out_.incoming_bytes = std::max(out_.incoming_bytes, incoming);
    out_.steps.push_back(std::move(step));
  }

  const Program& program_;
  bool call_per_region_;
  std::uint32_t stage_ = 0;
  Schedule out_;
};

}  // namespace

Schedule by_messages(const Program& program, bool call_per_region) {
  return Messages(program, call_per_region).make();
}

}  // namespace m2n::nccl_reference
