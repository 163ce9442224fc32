// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/memory_arena.hpp"

#include <string>

#include "core/error.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl/lane.hpp"
#include "transports/nccl/window.hpp"

namespace m2n::nccl {
namespace {

class CudaArena final : public Arena {
 public:
  CudaArena(int device, std::uint64_t bytes) : device_(device), bytes_(bytes) {
    if (windows_exist() && window_sizes_may_differ()) {
      window_ = std::make_unique<DeviceArena>(device, bytes);
      data_ = window_->data();
    } else if (bytes > 0) {
      const DeviceGuard guard(device);
      void* data = nullptr;
      const cudaError_t result = cudaMalloc(&data, bytes);
      if (result == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw Error(Errc::unavailable, "no " + std::to_string(bytes) + " bytes left on device " +
                                           std::to_string(device));
      }
      check(result, "allocate device memory");
      data_ = static_cast<std::byte*>(data);
      plain_.reset(data);
    }
    if (bytes > 0) {
      const Turn turn(device);
      check(cudaMemsetAsync(data_, 0, bytes, turn->stream()), "zero an arena");
      turn->finish("zero an arena");
    }
  }
  LocalBuffer take(std::uint64_t bytes, std::uint64_t align) override {
    const std::uint64_t begin = used_ + (align - used_ % align) % align;
    if (begin > bytes_ || bytes > bytes_ - begin) {
      throw Error(Errc::bad_argument, std::to_string(bytes) + " bytes of an arena that has " +
                                          std::to_string(bytes_ - used_) + " left of " +
                                          std::to_string(bytes_));
    }
    used_ = begin + bytes;
    return {data_ + begin, bytes, MemorySpace::device, device_};
  }

 private:
  struct Free {
    void operator()(void* data) const noexcept { cudaFree(data); }
  };

  int device_;
  std::uint64_t bytes_;
  std::uint64_t used_ = 0;
  std::byte* data_ = nullptr;
  std::unique_ptr<DeviceArena> window_;
  std::unique_ptr<void, Free> plain_;
};

}  // namespace

std::unique_ptr<Arena> reserve_arena(int device, std::uint64_t bytes) {
  return std::make_unique<CudaArena>(device, bytes);
}

}  // namespace m2n::nccl
