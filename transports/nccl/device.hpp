// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Owners of CUDA things, and what the driver knows about an address.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace m2n::nccl {

/// @throws TransportError{peer_lost} "nccl: <doing>: <the library's words>".
void check(cudaError_t result, const char* doing);

/// Makes @p device current in this thread, and restores the former one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
};

/// A stream that does not wait for the legacy default stream.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Orders streams; takes no times.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "record an event"); }
  /// Work on @p stream after this call waits for the last record().
  void hold(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "wait for an event");
  }
  /// cudaErrorNotReady until the work before the last record() is done.
  cudaError_t query() const noexcept { return cudaEventQuery(event_); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Plain device memory, zeroed.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::uint64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Gives the memory up without freeing it: work that cannot be stopped may still use it.
  void leak() { data_ = nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// The allocation that an address lies in.
struct Allocation {
  std::uint64_t base = 0;
  std::uint64_t bytes = 0;
  bool exportable = false;  ///< A CUDA IPC handle can be made of it.
  int device = -1;
};
/// @throws TransportError{bad_argument} when @p address is no device memory. @param what  For the
/// message: "the buffer of 'w'".
Allocation allocation_of(const void* address, const std::string& what);

/// What the driver calls this machine's device, e.g. "0000:00:06.0".
std::string bus_id(int device);

}  // namespace m2n::nccl
