// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Which ranks can write into each other's memory, and where that memory is seen from here.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api/group.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {

/// How the bytes of a pair travel. "local": both ranks on one device; "peer": two devices mapped
/// inside a process; "ipc": mapped through CUDA IPC; "window": mapped by NCCL; "wire": messages.
enum class Path : std::uint8_t { local, peer, ipc, window, wire };
std::string to_string(Path path);

/// What the user allows. Ranks on one device copy locally unless the wire is forced.
enum class PathChoice : std::uint8_t { automatic, window, ipc, wire };
PathChoice path_choice_from_string(const std::string& name);

/// What every rank knows of another after connect().
struct Identity {
  std::string host;  ///< Boot id: equal for processes of one running system.
  std::uint64_t process = 0;
  std::string processes;             ///< The space that `process` is a number of; empty: not known.
  std::string bus;                   ///< Of the device.
  std::vector<std::string> reaches;  ///< Bus ids of devices that the device can map.
  int device = 0;

  std::string encode() const;
  static Identity decode(const std::string& text);
  /// Of this process and @p device. @throws TransportError.
  static Identity mine(int device);
};

/// One allocation as a rank offers it to the others.
struct Offer {
  Allocation allocation;
  cudaIpcMemHandle_t handle{};
};

/// What a rank says of itself at prepare().
struct Advert {
  std::vector<Offer> allocations;  ///< [0] holds the control block.
  std::uint64_t control_offset = 0;
  /// By buffer of the destination role, then scratch: allocation and offset; no allocation: -1.
  struct Place {
    std::int64_t allocation = -1;
    std::uint64_t offset = 0;
  };
  std::vector<Place> places;
  std::uint64_t wire_peers = 0;    ///< Messages under way in a step, if all went by wire.
  std::uint64_t window_bytes = 0;  ///< Of the one allocation that can be a window; 0: none.
  std::int64_t window_allocation = -1;
  std::string settings;  ///< Options that must be equal on all ranks.

  std::string encode() const;
  static Advert decode(const std::string& text);
};

/// Path that both ranks of a pair agree on before anything is mapped: from a rank with identity
/// @p from into the memory that @p advert offers. @param windows  Every rank can register one.
Path propose_path(const Identity& from, const Identity& to, const Advert& advert, PathChoice choice,
                  bool windows);

/// CUDA IPC mappings of this process, shared by the sessions that use them and closed with the
/// last.
class IpcMappings {
 public:
  /// Where this process sees the allocation of @p offer. The result keeps it mapped.
  std::shared_ptr<void> open(const Offer& offer);

 private:
  std::map<std::string, std::weak_ptr<void>> open_;
};

}  // namespace m2n::nccl
