// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What a comparison is held against: how fast this machine copies, measured in the same run.

#include <cstdint>
#include <string>

#include "core/api/memory.hpp"
#include "core/layout/mesh.hpp"
#include "core/plan/problem.hpp"

namespace m2n::cli {

/// Of device memory: one copy from a device to another (or to itself, where there is one), by a
/// copy engine: the rate of a link, each direction. Of host memory: a copy by all processors at
/// once: the rate of the machine.
struct Limit {
  double bytes_per_second = 0;  ///< Median of ten copies after two.
  std::uint64_t bytes = 0;      ///< Of a copy: 4 GiB of device memory, 1 GiB of host memory.
  std::string what;             ///< "copy engine, device 0 to 1".
};

/// @param world  Ranks of the comparison; with one rank it has one device.
/// @param bytes  Of a copy; 0: as Limit says.
/// @throws Error{unavailable} where there is no such memory.
Limit measure_limit(MemorySpace space, Rank world, std::uint64_t bytes);

/// Bytes that the destinations of @p problem hold when a round has ended.
std::uint64_t payload_bytes(const Problem& problem);

/// Seconds below which no round of @p problem can be: in device memory the lower bound of any plan
/// over links of that rate (m2n plan's B rules), in host memory every byte that lands over the rate
/// of the machine. 0 when nothing moves.
double limit_seconds(const Problem& problem, MemorySpace space, const Limit& limit);

}  // namespace m2n::cli
