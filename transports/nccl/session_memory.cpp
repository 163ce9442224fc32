// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/session_memory.hpp"

#include <map>
#include <mutex>
#include <new>
#include <string>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

struct SharedMemories {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<DeviceMemory>> by_address;
};

SharedMemories& shared_memories() {
  static SharedMemories memories;
  return memories;
}

}  // namespace

std::shared_ptr<DeviceMemory> make_shared_memory(std::uint64_t bytes) {
  auto memory = std::make_shared<DeviceMemory>(bytes);
  SharedMemories& all = shared_memories();
  const std::lock_guard lock(all.mutex);
  all.by_address[reinterpret_cast<std::uint64_t>(memory->data())] = memory;
  return memory;
}

std::shared_ptr<DeviceMemory> find_shared_memory(std::uint64_t address) {
  SharedMemories& all = shared_memories();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_address.find(address);
  return found == all.by_address.end() ? nullptr : found->second.lock();
}

PinnedWords::PinnedWords() {
  void* data = nullptr;
  check(cudaHostAlloc(&data, sizeof(HostWords), cudaHostAllocMapped | cudaHostAllocPortable),
        "allocate pinned host memory");
  words_ = new (data) HostWords{};
}

PinnedWords::~PinnedWords() { cudaFreeHost(words_); }

SessionMemory::SessionMemory(const Program& program, const Buffers& buffers, int device,
                             std::size_t world) {
  std::uint64_t bytes = 0;
  for (const auto* side : {&buffers.source, &buffers.destination}) {
    for (const LocalBuffer& buffer : *side) {
      if (buffer.space == MemorySpace::host && buffer.data != nullptr) {
        bytes += align_up(buffer.bytes);
      }
    }
  }
  mirrored_ = make_shared_memory(bytes);
  for (std::size_t i = 0; i < buffers.source.size(); ++i) {
    source_.push_back(place(buffers.source[i], false, i, program.rank, device));
  }
  for (std::size_t i = 0; i < buffers.destination.size(); ++i) {
    destination_.push_back(place(buffers.destination[i], true, i, program.rank, device));
  }
  scratch_ = make_shared_memory(program.scratch_bytes);
  control_ = make_shared_memory(sizeof(ControlHead) + 2 * world * sizeof(std::uint64_t));
}

/// The device address of a buffer.
std::uint64_t SessionMemory::place(const LocalBuffer& buffer, bool destination, std::size_t index,
                                   Rank rank, int device) {
  if (buffer.data == nullptr) {
    return 0;
  }
  if (buffer.space == MemorySpace::host) {
    std::byte* mirror = mirrored_->data() + mirrored_bytes_;
    mirrored_bytes_ += align_up(buffer.bytes);
    mirrors_.push_back({buffer.data, mirror, buffer.bytes, destination});
    return reinterpret_cast<std::uint64_t>(mirror);
  }
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, buffer.data), "look at a buffer");
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != device) {
    throw TransportError(Errc::bad_argument,
                         "nccl: " + std::string(destination ? "destination" : "source") +
                             " buffer " + std::to_string(index) + " of rank " +
                             std::to_string(rank) +
                             (attributes.type == cudaMemoryTypeDevice
                                  ? " lies on device " + std::to_string(attributes.device)
                                  : std::string(" is no device memory")) +
                             ", expected memory of the rank's device " + std::to_string(device));
  }
  return reinterpret_cast<std::uint64_t>(buffer.data);
}

std::uint64_t SessionMemory::base(const Endpoint& end) const {
  auto base = reinterpret_cast<std::uint64_t>(scratch_->data());
  if (end.role == Role::source) {
    base = source_.at(end.buffer);
  } else if (end.role == Role::destination) {
    base = destination_.at(end.buffer);
  }
  expects(base != 0, "a buffer for every region of the program");
  return base;
}

void SessionMemory::copy_in(cudaStream_t stream) const {
  for (const Mirror& m : mirrors_) {
    check(cudaMemcpyAsync(m.device, m.host, m.bytes, cudaMemcpyHostToDevice, stream),
          "copy a buffer to the device");
  }
}

void SessionMemory::copy_out(cudaStream_t stream) const {
  for (const Mirror& m : mirrors_) {
    if (m.destination) {
      check(cudaMemcpyAsync(m.host, m.device, m.bytes, cudaMemcpyDeviceToHost, stream),
            "copy a buffer to the host");
    }
  }
}

}  // namespace m2n::nccl
