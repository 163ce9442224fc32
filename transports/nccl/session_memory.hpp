// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The memory of a session: where the rank's buffers lie on its device, its control block, and the
/// words that kernels share with the host.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/plan/plan.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/kernels.hpp"

namespace m2n::nccl {

/// Of what is carved out of an allocation.
constexpr std::uint64_t kArenaAlign = 256;
constexpr std::uint64_t align_up(std::uint64_t bytes) {
  return (bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
}

/// Device memory that peers of this process may write, zeroed. Ranks that are threads of one
/// process find each other's by address and keep it alive, so that a late flag never meets freed
/// memory.
std::shared_ptr<DeviceMemory> make_shared_memory(std::uint64_t bytes);
/// Memory of make_shared_memory() at @p address, or null.
std::shared_ptr<DeviceMemory> find_shared_memory(std::uint64_t address);

/// Words in pinned host memory that kernels reach.
class PinnedWords {
 public:
  PinnedWords();
  ~PinnedWords();
  PinnedWords(const PinnedWords&) = delete;
  PinnedWords& operator=(const PinnedWords&) = delete;

  HostWords* get() const { return words_; }
  static std::uint64_t read(std::uint64_t& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  }
  static void write(std::uint64_t& word, std::uint64_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
  }

 private:
  HostWords* words_ = nullptr;
};

/// One rank's buffers on its device. Buffers in host memory get a mirror there. Its control block
/// and scratch memory lie beside them.
class SessionMemory {
 public:
  /// @p device must be current. @throws TransportError{bad_argument} naming a buffer that is no
  /// memory of @p device.
  SessionMemory(const Program& program, const Buffers& buffers, int device, std::size_t world);

  /// @pre The rank holds the buffer.
  std::uint64_t address(const Endpoint& end) const { return base(end) + end.offset_bytes; }
  std::uint64_t base(const Endpoint& end) const;

  /// Places that peers write: the buffers of the destination role, then scratch.
  std::size_t place_count() const { return destination_.size() + 1; }
  std::size_t place_index(const Endpoint& end) const {
    return end.role == Role::scratch ? destination_.size() : end.buffer;
  }

  DeviceMemory& control() const { return *control_; }
  std::uint64_t bytes() const { return control_->bytes() + scratch_->bytes() + mirrored_->bytes(); }

  bool has_mirrors() const { return !mirrors_.empty(); }
  void copy_in(cudaStream_t stream) const;   ///< Host memory to its mirrors.
  void copy_out(cudaStream_t stream) const;  ///< Destinations back.

 private:
  /// A host buffer and its place in device memory.
  struct Mirror {
    std::byte* host;
    std::byte* device;
    std::uint64_t bytes;
    bool destination;
  };

  std::uint64_t place(const LocalBuffer& buffer, bool destination, std::size_t index, Rank rank,
                      int device);

  std::vector<std::uint64_t> source_;
  std::vector<std::uint64_t> destination_;
  std::vector<Mirror> mirrors_;
  std::uint64_t mirrored_bytes_ = 0;
  std::shared_ptr<DeviceMemory> mirrored_;
  std::shared_ptr<DeviceMemory> scratch_;
  std::shared_ptr<DeviceMemory> control_;
};

}  // namespace m2n::nccl
