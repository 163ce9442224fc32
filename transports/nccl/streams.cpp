// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/streams.hpp"

#include <utility>

namespace m2n::nccl {

std::unique_ptr<Streams> StreamPool::take(bool engine, bool wire) {
  std::unique_ptr<Streams> streams;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      streams = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!streams) {
    streams = std::make_unique<Streams>();
  }
  const auto make = [](std::unique_ptr<Stream>& stream, bool wanted) {
    if (wanted && !stream) {
      stream = std::make_unique<Stream>();
    }
  };
  make(streams->engine, engine);
  make(streams->pack, wire);
  make(streams->exchange, wire);
  make(streams->unpack, wire);
  return streams;
}

void StreamPool::give(std::unique_ptr<Streams> streams) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(streams));
}

}  // namespace m2n::nccl
