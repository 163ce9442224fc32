// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Settings of the transport that moves weights as trainers do today.

#include <cstdint>
#include <string>

#include "core/api/registry.hpp"

namespace m2n::nccl_reference {

/// In front of messages.
inline constexpr const char* kWho = "transport 'nccl_reference'";

/// How the bytes travel.
enum class Method : std::uint8_t {
  packed,     ///< Gathered on one rank, packed, broadcast, unpacked by every worker.
  broadcast,  ///< The same, a tensor at a time.
  group,      ///< The plan's regions: one group of sends and receives a parameter.
  calls,      ///< The same: one call a region.
};
std::string to_string(Method method);

/// A plain value. Keys of the options are the member names, and unpack=each or fused.
struct ReferenceOptions {
  Method method = Method::packed;
  std::uint64_t pack_bytes = 1ULL << 30;  ///< Of method packed; there are two packs.
  /// Unpacking by one call a parameter, as load_weights() does, or by one kernel for all of a step.
  bool fused_unpack = false;
  bool registered = true;    ///< Buffers are made known to NCCL.
  int device = -1;           ///< -1: the rank modulo the number of devices.
  std::uint64_t stream = 0;  ///< The caller's stream, as a number; 0: the legacy default stream.

  /// @throws Error{usage} for an unknown key or a value out of range.
  static ReferenceOptions parse(const Options& options);
  /// What has to be equal on all ranks, as text.
  std::string shared() const;
};

}  // namespace m2n::nccl_reference
