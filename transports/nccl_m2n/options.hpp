// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Settings of the transport over NVIDIA's reshard library.

#include <cstdint>
#include <map>
#include <string>

#include "core/api/registry.hpp"
#include "transports/nccl_m2n/forms.hpp"

namespace m2n::nccl_m2n {

/// In front of messages.
inline constexpr const char* kWho = "transport 'nccl_m2n'";

/// A plain value. Keys of the options are the member names. What is empty or 0 stays as the library
/// has it, or as its variables in the environment say.
struct M2nOptions {
  std::string library = "libnccl_m2n.so";  ///< A path, or a name that the loader finds.
  std::string path = "pack";               ///< pack, direct or pipe: how the library copies.
  bool grouped = false;                    ///< All tensors of a round in group calls.
  std::string internal_streams;            ///< on or off: the library's own streams.
  std::string staging;                 ///< BYTES:SLOTS[,BYTES:SLOTS...]: the buffers of path pack.
  std::string algorithm;               ///< auto, ring or direct: how bytes travel between islands.
  std::string balance;                 ///< uniform or node_aware: which source replica serves whom.
  std::string pipe_network;            ///< device or host_rma: the network of path pipe.
  std::uint64_t ctas = 0;              ///< Thread blocks of the library's kernels.
  std::uint64_t chunk_bytes = 0;       ///< Of the pack kernel.
  std::uint64_t staging_channels = 0;  ///< Of paths direct and pipe, ...
  std::uint64_t staging_channel_bytes = 0;  ///< ... bytes of each, ...
  std::uint64_t staging_chunk_bytes = 0;    ///< ... and of a message in them.
  int device = -1;                          ///< -1: the rank modulo the number of devices.
  std::uint64_t stream = 0;  ///< The caller's stream, as a number; 0: the legacy default stream.

  /// @throws Error{usage} for an unknown key or a value out of range.
  static M2nOptions parse(const Options& options);
  /// The library's variables for these settings.
  std::map<std::string, std::string> variables() const;
  /// Of the path, for ranks on one host or on several.
  Caps caps(bool one_host) const;
  /// What has to be equal on all ranks, as text.
  std::string shared() const;
};

}  // namespace m2n::nccl_m2n
