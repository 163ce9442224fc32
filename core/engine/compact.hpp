// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Takes a rank's compact local tensor out of its buffers.

#include <cstddef>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/layout/layout.hpp"

namespace m2n {

/// A compact local tensor, and its bytes (row-major over shard.local_shape).
struct CompactTensor {
  CompactShard shard;
  std::vector<std::byte> bytes;
};

/// @param slots  The buffers behind the layout's slots, on @p rank.
CompactTensor gather_compact(const Layout& layout, Rank rank,
                             const std::vector<LocalBuffer>& slots);

}  // namespace m2n
