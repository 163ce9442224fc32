// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/bench_limit.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/cli/output.hpp"
#include "core/error.hpp"
#include "core/plan/certificate.hpp"

namespace m2n::cli {
namespace {

constexpr int kWarmUps = 2;
constexpr int kCopies = 10;

double median_copy(const std::function<void()>& copy) {
  std::vector<double> seconds;
  for (int i = 0; i < kWarmUps + kCopies; ++i) {
    const auto start = std::chrono::steady_clock::now();
    copy();
    const auto end = std::chrono::steady_clock::now();
    if (i >= kWarmUps) {
      seconds.push_back(std::chrono::duration<double>(end - start).count());
    }
  }
  return median(std::move(seconds));
}

/// A part of a buffer.
LocalBuffer slice(const LocalBuffer& buffer, std::uint64_t begin, std::uint64_t bytes) {
  return {buffer.data + begin, bytes, buffer.space, buffer.device};
}

Limit device_limit(Rank world, std::uint64_t bytes) {
  const Memory& memory = memory_of(MemorySpace::device);
  const int devices = memory.device_count();
  if (devices < 1) {
    throw Error(Errc::unavailable,
                "no device works here, expected at least one; see --memory host");
  }
  const int to = std::min<int>(devices, world) > 1 ? 1 : 0;
  const std::uint64_t free = std::min(memory.free_bytes(0), memory.free_bytes(to));
  Limit limit;
  limit.bytes = std::min(bytes > 0 ? bytes : std::uint64_t{4} << 30, free / 4);
  limit.what = "copy engine, device 0 to " + std::to_string(to);
  const auto from_arena = memory.reserve(limit.bytes, 0);
  const auto to_arena = memory.reserve(limit.bytes, to);
  const LocalBuffer source = from_arena->take(limit.bytes);
  const LocalBuffer destination = to_arena->take(limit.bytes);
  limit.bytes_per_second =
      static_cast<double>(limit.bytes) / median_copy([&] { memory.copy(source, destination); });
  return limit;
}

Limit host_limit(std::uint64_t bytes) {
  const Memory& memory = memory_of(MemorySpace::host);
  const std::uint64_t threads = std::max(1U, std::thread::hardware_concurrency());
  Limit limit;
  limit.bytes = std::min(bytes > 0 ? bytes : std::uint64_t{1} << 30, memory.free_bytes(0) / 8);
  limit.what = "memcpy by " + std::to_string(threads) + " threads";
  const auto from_arena = memory.reserve(limit.bytes, 0);
  const auto to_arena = memory.reserve(limit.bytes, 0);
  const LocalBuffer source = from_arena->take(limit.bytes);
  const LocalBuffer destination = to_arena->take(limit.bytes);
  // Pages of their own: a fresh one is the kernel's single page of zeros.
  const Shape shape{static_cast<Index>(limit.bytes)};
  memory.fill_synthetic(shape, Box::whole(shape), DType::u8, 1, source, row_major(shape));
  const std::uint64_t share = (limit.bytes + threads - 1) / threads;
  limit.bytes_per_second =
      static_cast<double>(limit.bytes) / median_copy([&] {
        std::vector<std::thread> copies;
        for (std::uint64_t begin = 0; begin < limit.bytes; begin += share) {
          const std::uint64_t part = std::min(share, limit.bytes - begin);
          copies.emplace_back([&, begin, part] {
            memory.copy(slice(source, begin, part), slice(destination, begin, part));
          });
        }
        for (std::thread& copy : copies) {
          copy.join();
        }
      });
  return limit;
}

}  // namespace

Limit measure_limit(MemorySpace space, Rank world, std::uint64_t bytes) {
  return space == MemorySpace::device ? device_limit(world, bytes) : host_limit(bytes);
}

std::uint64_t payload_bytes(const Problem& problem) {
  std::uint64_t sum = 0;
  for (const Parameter& parameter : problem.parameters()) {
    for (const RankPiece& entry : parameter.destination.layout->pieces()) {
      sum += static_cast<std::uint64_t>(entry.piece.box.volume()) *
             bytes_of(parameter.destination_dtype());
    }
  }
  return sum;
}

double limit_seconds(const Problem& problem, MemorySpace space, const Limit& limit) {
  if (space == MemorySpace::host) {
    return static_cast<double>(payload_bytes(problem)) / limit.bytes_per_second;
  }
  const Topology links = Topology::single_island(problem.world_size(),
                                                 limit.bytes_per_second * 1e-9, /*latency_us=*/0);
  const Bounds bounds = bounds_of(FlowClasses(problem), links);
  return bounds.any.empty() ? 0 : bounds.seconds();
}

}  // namespace m2n::cli
