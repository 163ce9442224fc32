// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Settings of the NCCL transport.

#include <cstdint>
#include <string>

#include "core/api/registry.hpp"
#include "transports/nccl/peers.hpp"
#include "transports/nccl/tables.hpp"

namespace m2n::nccl {

/// Whether a round is captured once and replayed. "auto": where the list kernel does all of it, so
/// that a replay has nothing to lose.
enum class GraphChoice : std::uint8_t { automatic, on, off };

/// A plain value. Keys of the options are the member names.
struct NcclOptions {
  PathChoice path = PathChoice::automatic;
  int device = -1;  ///< -1: the rank modulo the number of devices.
  std::uint64_t staging_bytes = 64 << 20;
  std::uint64_t direct_bytes = 4 << 20;  ///< On the wire, larger contiguous regions are not staged.
  std::uint64_t step_bytes = 1ULL << 30;  ///< Unstaged bytes of a pair in one group of messages.
  EngineModel engine;  ///< engine_min_bytes, engine_max_copies, engine_gap_bytes, engine_host_us.
  int blocks = 132;    ///< Thread blocks of the list kernel.
  int max_cta = 0;     ///< Of the context: cap on blocks and on NCCL's own; 0 for none.
  GraphChoice graph = GraphChoice::automatic;
  std::uint64_t stream = 0;  ///< The caller's stream, as a number; 0: the legacy default stream.

  /// @throws Error{usage} for an unknown key or a value out of range.
  static NcclOptions parse(const Options& options);
  /// What has to be equal on all ranks, as text.
  std::string shared() const;
};

}  // namespace m2n::nccl
