// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_common/device_buffers.hpp"

#include <string>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

constexpr std::uint64_t kMirrorAlign = 256;

std::uint64_t room_for(const LocalBuffer& buffer) {
  return buffer.data == nullptr || buffer.space != MemorySpace::host
             ? 0
             : (buffer.bytes + kMirrorAlign - 1) / kMirrorAlign * kMirrorAlign;
}

}  // namespace

int pick_device(std::string_view who, Rank rank, int choice) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    cudaGetLastError();
    throw TransportError(
        Errc::unavailable,
        std::string(who) + " needs a CUDA device and this machine has none that works (" +
            cudaGetErrorString(result == cudaSuccess ? cudaErrorNoDevice : result) +
            "), expected a GPU with its driver; without one take 'loopback'");
  }
  if (choice >= count) {
    throw TransportError(Errc::bad_argument,
                         std::string(who) + ": device " + std::to_string(choice) +
                             ", expected a number below " + std::to_string(count));
  }
  return choice >= 0 ? choice : static_cast<int>(rank % count);
}

DeviceBuffers::DeviceBuffers(std::string_view who, Rank rank, const Buffers& buffers, int device) {
  std::uint64_t bytes = 0;
  for (const auto* side : {&buffers.source, &buffers.destination}) {
    for (const LocalBuffer& buffer : *side) {
      bytes += room_for(buffer);
    }
  }
  memory_ = DeviceMemory(bytes);
  std::uint64_t used = 0;
  const auto place = [&](const LocalBuffer& buffer, bool destination) -> std::uint64_t {
    if (buffer.data == nullptr) {
      return 0;
    }
    if (buffer.space == MemorySpace::host) {
      std::byte* const at = memory_.data() + used;
      used += room_for(buffer);
      mirrors_.push_back({buffer.data, at, buffer.bytes, destination});
      return reinterpret_cast<std::uint64_t>(at);
    }
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, buffer.data), "look at a buffer");
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != device) {
      throw TransportError(Errc::bad_argument,
                           std::string(who) + ": a " + (destination ? "destination" : "source") +
                               " buffer of rank " + std::to_string(rank) +
                               (attributes.type == cudaMemoryTypeDevice
                                    ? " lies on device " + std::to_string(attributes.device)
                                    : std::string(" is no device memory")) +
                               ", expected memory of the rank's device " + std::to_string(device));
    }
    return reinterpret_cast<std::uint64_t>(buffer.data);
  };
  for (const LocalBuffer& buffer : buffers.source) {
    source_.push_back(place(buffer, false));
  }
  for (const LocalBuffer& buffer : buffers.destination) {
    destination_.push_back(place(buffer, true));
  }
}

void DeviceBuffers::fill_mirrors(cudaStream_t stream) const {
  for (const Mirror& m : mirrors_) {
    check(cudaMemcpyAsync(m.device, m.host, m.bytes, cudaMemcpyHostToDevice, stream),
          "copy a buffer to the device");
  }
}

void DeviceBuffers::copy_back(cudaStream_t stream) const {
  for (const Mirror& m : mirrors_) {
    if (m.destination) {
      check(cudaMemcpyAsync(m.host, m.device, m.bytes, cudaMemcpyDeviceToHost, stream),
            "copy a buffer to the host");
    }
  }
}

}  // namespace m2n::nccl
