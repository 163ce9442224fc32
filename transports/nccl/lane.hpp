// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Work on device memory beside rounds: a stream a device, and who uses it.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "transports/nccl/device.hpp"

namespace m2n::nccl {

/// Of a region that is staged between a device and the host at a time, and of the tables of digests
/// that are taken at a time.
constexpr std::uint64_t kScratchBytes = 32 << 20;

/// A stream and scratch memory of a device, and whoever uses them. The stream goes before others,
/// which gives it a hardware queue apart from the streams of rounds: those may wait for a rank that
/// is busy here.
class Lane {
 public:
  explicit Lane(int device);

  cudaStream_t stream() const { return stream_; }
  std::byte* scratch() const { return scratch_.data(); }
  int device() const { return device_; }
  std::mutex& mutex() { return mutex_; }

  void finish(const char* doing) const {
    check(cudaGetLastError(), doing);
    check(cudaStreamSynchronize(stream_), doing);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  DeviceMemory scratch_;
  std::mutex mutex_;
};

/// Lanes live as long as the process: CUDA may be gone before its last objects.
Lane& lane_of(int device);

/// A lane to oneself, its device current.
class Turn {
 public:
  explicit Turn(int device) : lane_(lane_of(device)), guard_(device), lock_(lane_.mutex()) {}
  const Lane* operator->() const { return &lane_; }
  const Lane& operator*() const { return lane_; }

 private:
  Lane& lane_;
  DeviceGuard guard_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace m2n::nccl
