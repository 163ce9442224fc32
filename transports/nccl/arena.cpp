// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/arena.hpp"

#include <nccl.h>

#include <string>

#include "core/error.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {

DeviceArena::DeviceArena(int device, std::uint64_t bytes) : bytes_(bytes), device_(device) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  if (bytes > 0 && ncclMemAlloc(&data, bytes) != ncclSuccess) {
    throw TransportError(Errc::unavailable, "nccl: no arena of " + std::to_string(bytes) +
                                                " bytes on device " + std::to_string(device) +
                                                ", expected that much free device memory");
  }
  data_ = static_cast<std::byte*>(data);
}

DeviceArena::~DeviceArena() {
  if (data_ != nullptr) {
    cudaSetDevice(device_);
    ncclMemFree(data_);
  }
}

LocalBuffer DeviceArena::take(std::uint64_t bytes, std::uint64_t align) {
  expects(align > 0, "an alignment of at least 1");
  const std::uint64_t begin = (used_ + align - 1) / align * align;
  if (bytes > bytes_ || begin > bytes_ - bytes) {
    throw Error(Errc::bad_argument, "an arena of " + std::to_string(bytes_) + " bytes has " +
                                        std::to_string(bytes_ - used_) + " left, expected " +
                                        std::to_string(bytes));
  }
  used_ = begin + bytes;
  return {data_ + begin, bytes, MemorySpace::device, device_};
}

}  // namespace m2n::nccl
