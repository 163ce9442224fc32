// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Settings of the UCX transport.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "core/api/registry.hpp"

namespace m2n::ucx {

/// How a lost peer shows. "peer": UCX tells, for which UCX before 1.16 gives up shared memory.
/// "kernel": ranks of one machine, whose processes the kernel knows. "auto": the second where it is
/// possible, else the first.
enum class ErrorChoice : std::uint8_t { automatic, peer, kernel };

/// Whether long rows are put. "auto": where UCX has a lane that can.
enum class PutChoice : std::uint8_t { automatic, on, off };

/// A plain value. Keys of the options are the member names.
struct UcxOptions {
  PutChoice puts = PutChoice::automatic;
  /// Rows from here on are put; shorter ones are packed. Nothing: measured, see crossover.hpp.
  std::optional<std::uint64_t> put_bytes;
  std::uint64_t piece_bytes = 16 << 20;   ///< Longest single put.
  std::uint64_t window_bytes = 64 << 20;  ///< Put and not yet complete, to one peer.
  std::uint64_t chunk_bytes = 64 << 10;   ///< Packed regions in one message.
  std::uint64_t slot_bytes = 256 << 10;   ///< Largest slot of a ring in shared memory.
  std::uint64_t ring_bytes =
      16 << 20;  ///< All rings of a rank, as long as slots are not too small.
  /// The same where one of the two has its memory on a device.
  std::uint64_t device_slot_bytes = 4 << 20;
  std::uint64_t device_ring_bytes = 64 << 20;
  /// Rows from here on UCX puts from device to device, where it can; the rest is written into the
  /// memory that it has mapped. As it is: all.
  std::uint64_t device_put_bytes = 1ULL << 60;
  bool slow_lanes = false;  ///< Device memory may travel over TCP ("allow", else "refuse").
  ErrorChoice errors = ErrorChoice::automatic;
  std::string tls;          ///< UCX_TLS: transports that UCX may take; empty: its own choice.
  std::string net_devices;  ///< UCX_NET_DEVICES; empty: its own choice.
  int rails = 0;            ///< Lanes that one operation may use; 0: UCX's own choice.
  bool threads = false;     ///< UCX's own locking ("multi") over ours ("serialized").
  std::chrono::microseconds spin{0};           ///< Looking for messages before going to sleep.
  std::chrono::milliseconds keepalive{1'000};  ///< Between two looks at a quiet peer.

  /// @throws Error{usage} for an unknown key or a value out of range.
  static UcxOptions parse(const Options& options);
  /// What has to be equal on all ranks, as text.
  std::string shared() const;
};

}  // namespace m2n::ucx
