// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/memory.hpp"

#include "core/error.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

class CudaArena final : public Arena {
 public:
  CudaArena(int device, std::uint64_t bytes) : arena_(device, bytes) {
    const DeviceGuard guard(device);
    check(cudaMemset(arena_.data(), 0, arena_.bytes()), "zero an arena");
    check(cudaDeviceSynchronize(), "zero an arena");
  }
  LocalBuffer take(std::uint64_t bytes, std::uint64_t align) override {
    return arena_.take(bytes, align);
  }

 private:
  DeviceArena arena_;
};

class CudaMemory final : public Memory {
 public:
  std::string_view name() const noexcept override { return "cuda"; }

  int device_count() const override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return count;
  }

  std::string description(int device) const override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "ask for a device's name");
    int driver = 0;
    int runtime = 0;
    check(cudaDriverGetVersion(&driver), "ask for the driver's version");
    check(cudaRuntimeGetVersion(&runtime), "ask for CUDA's version");
    const auto dotted = [](int version) {
      return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    return std::string(properties.name) + ", driver " + dotted(driver) + ", CUDA " +
           dotted(runtime);
  }

  std::unique_ptr<Arena> reserve(std::uint64_t bytes, int device) const override {
    return std::make_unique<CudaArena>(device, bytes);
  }

  std::uint64_t free_bytes(int device) const override {
    const DeviceGuard guard(device);
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "ask for free device memory");
    return free;
  }

  void write(const LocalBuffer& to, std::span<const std::byte> from) const override {
    expects(from.size() <= to.bytes, "bytes that fit the buffer");
    const DeviceGuard guard(to.device);
    check(cudaDeviceSynchronize(), "write device memory");
    if (from.empty()) {
      return;
    }
    check(cudaMemcpy(to.data, from.data(), from.size(), cudaMemcpyHostToDevice),
          "write device memory");
  }

  void read(const LocalBuffer& from, std::span<std::byte> to) const override {
    expects(to.size() <= from.bytes, "bytes that the buffer has");
    const DeviceGuard guard(from.device);
    check(cudaDeviceSynchronize(), "read device memory");
    if (to.empty()) {
      return;
    }
    check(cudaMemcpy(to.data(), from.data, to.size(), cudaMemcpyDeviceToHost),
          "read device memory");
  }

  void zero(const LocalBuffer& buffer) const override {
    const DeviceGuard guard(buffer.device);
    check(cudaDeviceSynchronize(), "zero device memory");
    if (buffer.bytes == 0) {
      return;
    }
    check(cudaMemset(buffer.data, 0, buffer.bytes), "zero device memory");
    check(cudaDeviceSynchronize(), "zero device memory");
  }

  void copy(const LocalBuffer& from, const LocalBuffer& to) const override {
    expects(from.bytes <= to.bytes, "bytes that fit the buffer");
    if (from.device != to.device) {
      const DeviceGuard guard(to.device);
      check(cudaDeviceSynchronize(), "copy device memory");
    }
    const DeviceGuard guard(from.device);
    if (from.device != to.device) {
      // Without it the driver copies in steps, through the host; a device that cannot stays so.
      (void)cudaDeviceEnablePeerAccess(to.device, 0);
      (void)cudaGetLastError();
    }
    check(cudaDeviceSynchronize(), "copy device memory");
    if (from.bytes > 0) {
      check(cudaMemcpyAsync(to.data, from.data, from.bytes, cudaMemcpyDeviceToDevice),
            "copy device memory");
    }
    check(cudaDeviceSynchronize(), "copy device memory");
  }

  void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                      const LocalBuffer& to, const Strides& strides) const override {
    const DeviceGuard guard(to.device);
    check(cudaDeviceSynchronize(), "fill device memory");
    device_fill_synthetic(shape, box, dtype, seed, to.data, strides);
  }

  std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype,
                              const LocalBuffer& from, const Strides& strides) const override {
    const DeviceGuard guard(from.device);
    check(cudaDeviceSynchronize(), "digest device memory");
    return device_digest_of_box(shape, box, dtype, from.data, strides);
  }
};

}  // namespace

void provide_cuda_memory() { provide_device_memory(std::make_unique<CudaMemory>()); }

}  // namespace m2n::nccl
