// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Memory of one rank: what it lent, and the scratch that a plan wants.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/memory.hpp"
#include "core/error.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

struct RankMemory {
  Buffers buffers;
  std::vector<std::byte> scratch;
  std::unique_ptr<Arena> device_scratch_owner;
  LocalBuffer device_scratch;  ///< Takes the place of scratch where it has any bytes.

  std::byte* address(const Endpoint& end) {
    switch (end.role) {
      case Role::source:
        return buffers.source[end.buffer].data + end.offset_bytes;
      case Role::destination:
        return buffers.destination[end.buffer].data + end.offset_bytes;
      case Role::scratch:
        break;
    }
    return scratch.data() + end.offset_bytes;
  }

  /// The region's first element, and what follows it; in memory of any kind.
  LocalBuffer place(const Endpoint& end) {
    switch (end.role) {
      case Role::source:
        return buffers.source[end.buffer].from(end.offset_bytes);
      case Role::destination:
        return buffers.destination[end.buffer].from(end.offset_bytes);
      case Role::scratch:
        break;
    }
    return device_scratch.bytes > 0
               ? device_scratch.from(end.offset_bytes)
               : host_buffer(scratch.data(), scratch.size()).from(end.offset_bytes);
  }

  /// The scale of a region's first element; nowhere where the region does not quantise.
  LocalBuffer scales_of(const Region& region) {
    return region.copy.quantises() ? place(region.scales) : LocalBuffer{};
  }
};

/// The device that buffers lie on; nothing when all are host memory.
/// @throws Error{unavailable} where there is no such device, or more than one. @param who
/// "transport 'x'".
inline std::optional<int> device_of(std::string_view who, const Buffers& buffers) {
  std::optional<int> found;
  for (const auto* side : {&buffers.source, &buffers.destination}) {
    for (const LocalBuffer& buffer : *side) {
      if (buffer.data == nullptr || buffer.space == MemorySpace::host || found == buffer.device) {
        continue;
      }
      const std::string lent =
          std::string(who) + " was lent a buffer on device " + std::to_string(buffer.device);
      if (found) {
        throw Error(Errc::unavailable, lent + " and one on device " + std::to_string(*found) +
                                           ", expected buffers of one device a rank");
      }
      const int count = memory_of(buffer).device_count();
      if (buffer.device < 0 || buffer.device >= count) {
        throw Error(Errc::unavailable, lent + ", expected one of the " + std::to_string(count) +
                                           " devices that work here");
      }
      found = buffer.device;
    }
  }
  return found;
}

/// @throws Error{unavailable} when a buffer lies in device memory. @param who  "transport 'x'".
inline void require_host_memory(std::string_view who, const Buffers& buffers) {
  for (const auto* side : {&buffers.source, &buffers.destination}) {
    for (const LocalBuffer& buffer : *side) {
      if (buffer.data != nullptr && buffer.space != MemorySpace::host) {
        throw Error(Errc::unavailable,
                    std::string(who) + " moves host memory, but was lent a buffer on device " +
                        std::to_string(buffer.device) + "; take a transport for device memory");
      }
    }
  }
}

}  // namespace m2n
