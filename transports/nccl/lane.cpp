// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/lane.hpp"

#include <map>

#include "transports/nccl/memory_kernels.hpp"

namespace m2n::nccl {

Lane::Lane(int device) : device_(device) {
  const DeviceGuard guard(device);
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "ask for priorities of streams");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "create a stream");
  load_memory_kernels();
  scratch_ = DeviceMemory(kScratchBytes);
}

Lane& lane_of(int device) {
  static std::mutex mutex;
  static auto& lanes = *new std::map<int, Lane>;
  const std::lock_guard lock(mutex);
  return lanes.try_emplace(device, device).first->second;
}

}  // namespace m2n::nccl
