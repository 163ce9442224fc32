// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Device memory that can become an NCCL window, for sources and sinks that own their weights.

#include <cstdint>

#include "core/api/buffers.hpp"

namespace m2n::nccl {

/// One allocation, handed out in order. Buffers that are taken in the order in which parameters
/// move lie one after the other, so that their regions become one.
///
/// For windows between processes, every rank's arena has the same size (NCCL before 2.30.7).
class DeviceArena {
 public:
  /// @throws TransportError{unavailable} when the device has not that much memory.
  DeviceArena(int device, std::uint64_t bytes);
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  /// The next @p bytes, at a multiple of @p align. @throws Error{bad_argument} when it is full.
  LocalBuffer take(std::uint64_t bytes, std::uint64_t align = 16);

  std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  int device() const noexcept { return device_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t used_ = 0;
  int device_ = 0;
};

}  // namespace m2n::nccl
