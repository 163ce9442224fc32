// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Host memory of one rank: what it lent, and the scratch that a plan wants.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/error.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

struct RankMemory {
  Buffers buffers;
  std::vector<std::byte> scratch;

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
};

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
