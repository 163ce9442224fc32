// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/device.hpp"

#include <cuda.h>

#include <array>

namespace m2n::nccl {
namespace {

/// Functions of the driver, found at run time: the library is linked against the runtime alone.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &state),
        "look up a driver function");
  if (state != cudaDriverEntryPointSuccess) {
    throw TransportError(Errc::unavailable, std::string("nccl: the CUDA driver has no ") + name +
                                                ", expected CUDA 12");
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace

void check(cudaError_t result, const char* doing) {
  if (result != cudaSuccess) {
    cudaGetLastError();  // the next call starts clean
    throw TransportError(Errc::peer_lost,
                         std::string("nccl: ") + doing + ": " + cudaGetErrorString(result));
  }
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&former_), "read the current device");
  check(cudaSetDevice(device), "select the device");
}
DeviceGuard::~DeviceGuard() { cudaSetDevice(former_); }

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
}
Stream::~Stream() { cudaStreamDestroy(stream_); }

Event::Event() {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event");
}
Event::~Event() { cudaEventDestroy(event_); }

DeviceMemory::DeviceMemory(std::uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  void* data = nullptr;
  const cudaError_t result = cudaMalloc(&data, bytes);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw TransportError(Errc::unavailable, "nccl: no " + std::to_string(bytes) +
                                                " bytes of device memory left for the transport, "
                                                "expected room for staging, scratch and tables");
  }
  check(result, "allocate device memory");
  data_ = static_cast<std::byte*>(data);
  check(cudaMemset(data, 0, bytes), "clear device memory");
  check(cudaStreamSynchronize(nullptr), "clear device memory");
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) {
    cudaFree(data_);
  }
}

Allocation allocation_of(const void* address, const std::string& what) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address), "look at a buffer");
  if (attributes.type != cudaMemoryTypeDevice) {
    throw TransportError(Errc::bad_argument, "nccl: " + what +
                                                 " is said to be device memory, but the driver "
                                                 "does not know its address, expected memory of "
                                                 "a CUDA device");
  }
  const auto range =
      driver_function<CUresult(CUdeviceptr*, std::size_t*, CUdeviceptr)>("cuMemGetAddressRange");
  const auto attribute =
      driver_function<CUresult(void*, CUpointer_attribute, CUdeviceptr)>("cuPointerGetAttribute");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  if (range(&base, &bytes, at) != CUDA_SUCCESS) {
    throw TransportError(Errc::bad_argument,
                         "nccl: " + what + " lies in no allocation that the driver knows");
  }
  int exportable = 0;
  attribute(&exportable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at);
  return {base, bytes, exportable != 0, attributes.device};
}

std::string bus_id(int device) {
  std::array<char, 32> text{};
  check(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
        "read a device's bus id");
  return text.data();
}

}  // namespace m2n::nccl
