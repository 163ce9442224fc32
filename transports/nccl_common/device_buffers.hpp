// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A rank's buffers as addresses of its device. Buffers in host memory get a mirror there, which is
/// filled before a round and copied back after it.

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/plan/plan.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {

/// The device that rank @p rank uses: @p choice, or with -1 the rank modulo the devices.
/// @throws TransportError{unavailable} without a device, {bad_argument} for a number beyond.
int pick_device(std::string_view who, Rank rank, int choice);

class DeviceBuffers {
 public:
  DeviceBuffers() = default;
  /// @pre @p device is current. @throws TransportError{bad_argument} for memory of another device.
  DeviceBuffers(std::string_view who, Rank rank, const Buffers& buffers, int device);

  /// 0 where the rank holds nothing.
  std::uint64_t source(std::uint32_t buffer) const { return source_.at(buffer); }
  std::uint64_t destination(std::uint32_t buffer) const { return destination_.at(buffer); }
  std::uint64_t mirror_bytes() const { return memory_.bytes(); }

  void fill_mirrors(cudaStream_t stream) const;
  void copy_back(cudaStream_t stream) const;
  /// Gives the mirrors up without freeing them.
  void leak() { memory_.leak(); }

 private:
  struct Mirror {
    std::byte* host;
    std::byte* device;
    std::uint64_t bytes;
    bool destination;
  };
  std::vector<std::uint64_t> source_;
  std::vector<std::uint64_t> destination_;
  std::vector<Mirror> mirrors_;
  DeviceMemory memory_;
};

}  // namespace m2n::nccl
