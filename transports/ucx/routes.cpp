// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/routes.hpp"

#include <algorithm>
#include <cstring>

#include "transports/common/segment.hpp"

namespace m2n::ucx {
namespace {

void append(std::string& text, std::uint64_t value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void append(std::string& text, const std::string& value) {
  append(text, static_cast<std::uint64_t>(value.size()));
  text += value;
}

/// Reads what append() wrote.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  std::uint64_t number() {
    std::uint64_t value = 0;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  std::string string() {
    const std::uint64_t bytes = number();
    return {take(bytes), bytes};
  }

 private:
  const char* take(std::uint64_t bytes) {
    if (bytes > text_.size() - at_) {
      throw TransportError(Errc::peer_lost, "ucx: a peer's keys are cut short");
    }
    const char* const here = text_.data() + at_;
    at_ += bytes;
    return here;
  }

  const std::string& text_;
  std::uint64_t at_ = 0;
};

std::uint64_t row_bytes(const StridedCopy& copy) {
  return copy.extents.empty() ? copy.destination_item_bytes()
                              : static_cast<std::uint64_t>(copy.extents[copy.extents.size() - 1]) *
                                    copy.destination_item_bytes();
}

/// Calls @p visit with the offsets in bytes, from the region's first element, of each row.
template <class Visit>
void for_each_row(const StridedCopy& copy, std::size_t dimension, Index source, Index destination,
                  const Visit& visit) {
  if (dimension + 1 >= copy.extents.size()) {
    visit(source, destination);
    return;
  }
  const auto item = static_cast<Index>(copy.source_item_bytes());  // equal on both sides
  for (Index i = 0; i < copy.extents[dimension]; ++i) {
    for_each_row(copy, dimension + 1, source + i * copy.source_strides[dimension] * item,
                 destination + i * copy.destination_strides[dimension] * item, visit);
  }
}

/// First and last byte that @p copy touches at one end, from its first element.
std::pair<Index, Index> reach(const StridedCopy& copy, const Strides& strides) {
  const auto item = static_cast<Index>(copy.source_item_bytes());
  Index low = 0;
  Index high = item;
  for (std::size_t d = 0; d < copy.extents.size(); ++d) {
    const Index span = (copy.extents[d] - 1) * strides[d] * item;
    (span < 0 ? low : high) += span;
  }
  return {low, high};
}

}  // namespace

void Zones::add(std::byte* data, std::uint64_t bytes) {
  if (bytes > 0) {
    ranges_.emplace_back(data, data + bytes);
  }
}

void Zones::register_all(const std::shared_ptr<const Context>& context, MemorySpace space) {
  std::sort(ranges_.begin(), ranges_.end());
  const auto page_of = [](const std::byte* at) {
    return reinterpret_cast<std::uintptr_t>(at) / page_aligned(1);
  };
  for (std::size_t i = 0; i < ranges_.size();) {
    auto [begin, end] = ranges_[i++];
    // Pages in between are in use, so that they can be registered. Of a device, an allocation is
    // registered, and no more.
    while (i < ranges_.size() &&
           (space == MemorySpace::device ? ranges_[i].first < end
                                         : page_of(ranges_[i].first) <= page_of(end - 1) + 1)) {
      end = std::max(end, ranges_[i++].second);
    }
    zones_.emplace_back(context, begin, static_cast<std::uint64_t>(end - begin), space);
  }
}

std::size_t Zones::find(const std::byte* data) const {
  const auto after = std::upper_bound(
      zones_.begin(), zones_.end(), data,
      [](const std::byte* at, const RegisteredMemory& zone) { return at < zone.data(); });
  return static_cast<std::size_t>(after - zones_.begin()) - 1;
}

std::string Keys::text() const {
  std::string out;
  append(out, ring_address);
  append(out, slot_bytes);
  append(out, put_bytes);
  append(out, std::uint64_t{direct});
  append(out, ring_key);
  append(out, zone_keys.size());
  for (const std::string& key : zone_keys) {
    append(out, key);
  }
  append(out, regions.size());
  for (const auto& [zone, address] : regions) {
    append(out, zone);
    append(out, address);
  }
  return out;
}

Keys Keys::parse(const std::string& text) {
  Reader in(text);
  Keys out;
  out.ring_address = in.number();
  out.slot_bytes = in.number();
  out.put_bytes = in.number();
  out.direct = in.number() != 0;
  out.ring_key = in.string();
  for (std::uint64_t left = in.number(); left > 0; --left) {
    out.zone_keys.push_back(in.string());
  }
  for (std::uint64_t left = in.number(); left > 0; --left) {
    const std::uint64_t zone = in.number();
    out.regions.emplace_back(zone, in.number());
  }
  return out;
}

Keys Keys::staged() const { return {ring_address, slot_bytes, 0, false, ring_key, {}, {}}; }

bool Way::has_long_rows(const StridedCopy& copy) const {
  const std::size_t rank = copy.extents.size();
  return put_bytes > 0 && copy.source_dtype == copy.destination_dtype &&
         row_bytes(copy) >= put_bytes &&
         (rank == 0 ||
          (copy.source_strides[rank - 1] == 1 && copy.destination_strides[rank - 1] == 1));
}

bool has_rows_between(const PairRegions& regions, std::uint64_t least, std::uint64_t end) {
  return std::any_of(regions.begin(), regions.end(), [&](const Region* region) {
    return Way{.put_bytes = least}.puts(region->copy) && row_bytes(region->copy) < end;
  });
}

void add_zones(const PairRegions& regions, Endpoint Region::*end, RankMemory& memory,
               const Way& way, Zones& zones) {
  for (const Region* region : regions) {
    if (const LocalBuffer place = memory.place(region->*end);
        way.puts(region->copy) && place.space == MemorySpace::device) {
      const LocalBuffer all = memory_of(place).allocation_of(place);
      zones.add(all.data, all.bytes);
    } else if (way.puts(region->copy)) {
      const auto [low, high] =
          reach(region->copy, end == &Region::from ? region->copy.source_strides
                                                   : region->copy.destination_strides);
      zones.add(place.data + low, static_cast<std::uint64_t>(high - low));
    }
  }
}

Incoming compile_incoming(const PairRegions& regions, std::uint32_t stage_count, RankMemory& memory,
                          const Way& way, Ring* ring, CopyQueue* queue) {
  Incoming in;
  in.ring = ring;
  in.way = way;
  auto at = regions.begin();
  for (std::uint32_t stage = 0; stage < stage_count; ++stage) {
    std::vector<PlacedRegion> packed;
    bool puts = false;
    for (; at != regions.end() && (*at)->stage == stage; ++at) {
      if (way.puts((*at)->copy)) {
        puts = true;
      } else {
        packed.push_back({(*at)->copy, memory.place((*at)->to)});
      }
    }
    in.packed.add_stage(packed, way.chunk_bytes);
    in.has_puts.push_back(puts);
  }
  if (queue != nullptr) {
    in.lists = in.packed.add_to(*queue);
  }
  return in;
}

Keys keys_for(const PairRegions& regions, RankMemory& memory, const Incoming& in,
              const Zones& zones, const std::string& ring_key) {
  Keys keys;
  if (in.way.ring) {
    keys.ring_address = reinterpret_cast<std::uintptr_t>(in.ring);
    keys.slot_bytes = in.way.chunk_bytes;
    keys.ring_key = ring_key;
  }
  keys.put_bytes = in.way.put_bytes;
  keys.direct = in.way.direct;
  std::map<std::size_t, std::uint64_t> numbers;  // of the zones that this sender needs
  for (const Region* region : regions) {
    if (!in.way.puts(region->copy)) {
      continue;
    }
    std::byte* const first = memory.place(region->to).data;
    const std::size_t zone = zones.find(first);
    const auto [entry, added] = numbers.try_emplace(zone, keys.zone_keys.size());
    if (added) {
      keys.zone_keys.push_back(zones.zone(zone).key());
    }
    keys.regions.emplace_back(entry->second, reinterpret_cast<std::uintptr_t>(first));
  }
  return keys;
}

Outgoing compile_outgoing(const PairRegions& regions, std::uint32_t stage_count, RankMemory& memory,
                          const UcxOptions& options, const Zones& sources, const Keys& keys,
                          ucp_ep_h endpoint, CopyQueue* queue) {
  Outgoing out;
  out.way = {.ring = keys.slot_bytes > 0,
             .chunk_bytes = keys.slot_bytes > 0 ? keys.slot_bytes : options.chunk_bytes,
             .put_bytes = keys.direct ? options.device_put_bytes : keys.put_bytes,
             .direct = keys.direct};
  for (const std::string& key : keys.zone_keys) {
    out.zone_keys.emplace_back(endpoint, key);
  }
  std::map<std::uint64_t, std::ptrdiff_t> shifts;  // by zone, from the peer's addresses to ours
  if (out.way.direct) {
    for (const auto& [zone, address] : keys.regions) {
      if (const auto [entry, added] = shifts.try_emplace(zone, 0); added) {
        entry->second = out.zone_keys.at(zone).map(address) - reinterpret_cast<std::byte*>(address);
      }
    }
  } else if (out.way.ring) {
    out.ring_key = RemoteKey(endpoint, keys.ring_key);
    out.ring = reinterpret_cast<Ring*>(out.ring_key.map(keys.ring_address));
  }
  auto at = regions.begin();
  auto target = keys.regions.begin();
  for (std::uint32_t stage = 0; stage < stage_count; ++stage) {
    std::vector<PlacedRegion> packed;
    std::vector<PlacedCopy> mapped;
    for (; at != regions.end() && (*at)->stage == stage; ++at) {
      const StridedCopy& copy = (*at)->copy;
      const LocalBuffer place = memory.place((*at)->from);
      if (!out.way.puts(copy)) {
        packed.push_back({copy, place, memory.scales_of(**at)});
        continue;
      }
      std::byte* const view = place.data;
      if (target == keys.regions.end()) {
        throw Error(Errc::bad_plan, "ucx: a peer awaits fewer regions than this rank has for it");
      }
      const auto [zone, address] = *target++;
      if (!out.way.has_long_rows(copy)) {
        const LocalBuffer there{reinterpret_cast<std::byte*>(address) + shifts.at(zone),
                                (*at)->bytes, MemorySpace::device, place.device};
        mapped.push_back({copy, place, there, memory.scales_of(**at)});
        continue;
      }
      const auto source_zone = static_cast<std::uint32_t>(sources.find(view));
      for_each_row(copy, 0, 0, 0, [&](Index source, Index destination) {
        const std::uint64_t row = row_bytes(copy);
        for (std::uint64_t begin = 0; begin < row; begin += options.piece_bytes) {
          out.puts.push_back({view + source + begin, std::min(options.piece_bytes, row - begin),
                              address + static_cast<std::uint64_t>(destination) + begin,
                              static_cast<std::uint32_t>(zone), source_zone});
        }
      });
    }
    out.packed.add_stage(packed, out.way.chunk_bytes);
    const std::size_t before = stage > 0 ? out.put_end.back() : 0;
    out.put_end.push_back(out.puts.size());
    out.has_puts.push_back(out.puts.size() > before || !mapped.empty());
    if (out.way.direct) {
      out.mapped_lists.push_back(queue->add_copies(mapped));
    }
  }
  if (queue != nullptr) {
    out.lists = out.packed.add_to(*queue);
  }
  return out;
}

}  // namespace m2n::ucx
