// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// How near copy_region() comes to memcpy: row shards to column shards, the copies of FSDP2 to
/// tensor-parallel workers, and transposes and casts, beside a parallel memcpy of as many bytes in
/// the same run. Buffers are touched before the first measurement, so page faults do not count.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/copy.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

constexpr int kThreads = 2;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Touched memory on huge pages where the system grants them.
class Buffer {
 public:
  explicit Buffer(std::uint64_t bytes) : bytes_(bytes) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(Errc::unavailable, "no memory for a buffer of " + std::to_string(bytes) +
                                         " bytes, expected a smaller benchmark");
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint
    std::memset(memory, 1, bytes);
    data_ = static_cast<std::byte*>(memory);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { munmap(data_, bytes_); }

  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_;
};

/// Runs @p body(thread) on each thread; the seconds until the last is done.
double seconds_of(const std::function<void(int)>& body) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < kThreads; ++t) {
    others.emplace_back(body, t);
  }
  body(0);
  for (std::thread& other : others) {
    other.join();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Contender {
  std::string name;
  std::function<void(int)> body;
  double best_seconds = 1e300;
};

struct Region {
  StridedCopy copy;
  std::uint64_t source_bytes;
  std::uint64_t destination_bytes;
};

/// Each of the @p kThreads column shards, from row shards that lie one behind the other: each part
/// of the buffers is one row shard of 64 MiB, half of it for each thread.
std::vector<Region> row_to_column_shards(std::uint64_t bytes, Index row_bytes, int thread) {
  constexpr auto kPartBytes = static_cast<Index>(64 * kMiB);
  const Index columns = row_bytes / 2;  // of one column shard
  const Index rows = kPartBytes / (row_bytes * kThreads);
  const StridedCopy copy{
      {rows, columns}, {columns * kThreads, 1}, {columns, 1}, DType::bf16, DType::bf16};
  std::vector<Region> regions;
  const std::uint64_t shard_bytes = bytes / kThreads;
  const auto t = static_cast<std::uint64_t>(thread);
  for (std::uint64_t part = 0; part * kPartBytes < bytes; ++part) {
    regions.push_back({copy, part * kPartBytes + t * static_cast<std::uint64_t>(row_bytes),
                       t * shard_bytes + part * (kPartBytes / kThreads)});
  }
  return regions;
}

void run(std::uint64_t bytes, int rounds) {
  const Buffer source(bytes);
  const Buffer destination(bytes);
  std::vector<Contender> contenders;
  const std::uint64_t half = bytes / kThreads;
  contenders.push_back({"memcpy, one block a thread", [&](int thread) {
                          const std::uint64_t at = static_cast<std::uint64_t>(thread) * half;
                          std::memcpy(destination.data() + at, source.data() + at, half);
                        }});
  const auto add = [&](std::string name, bool bypass, auto regions_of) {
    contenders.push_back({std::move(name), [&, bypass, regions_of](int thread) {
                            for (const Region& region : regions_of(thread)) {
                              copy_region(region.copy, source.data() + region.source_bytes,
                                          destination.data() + region.destination_bytes, bypass);
                            }
                          }});
  };
  for (const bool bypass : {false, true}) {
    const std::string how = bypass ? ", past the caches" : "";
    add("one contiguous region" + how, bypass, [=](int thread) {
      const std::uint64_t at = static_cast<std::uint64_t>(thread) * half;
      const auto count = static_cast<Index>(half / 2);
      return std::vector<Region>{{{{count}, {1}, {1}, DType::bf16, DType::bf16}, at, at}};
    });
    for (const Index row_bytes : {256, 512, 1024, 4096, 16384}) {
      add("rows of " + std::to_string(row_bytes) + " B" + how, bypass,
          [=](int thread) { return row_to_column_shards(bytes, row_bytes, thread); });
    }
  }
  for (const Index columns : {4096, 4100}) {
    add("transpose of bf16, " + std::to_string(columns) + " columns", false, [=](int thread) {
      const std::uint64_t at = static_cast<std::uint64_t>(thread) * half;
      const Index rows = static_cast<Index>(half / 2) / columns;
      return std::vector<Region>{
          {{{rows, columns}, {columns, 1}, {1, rows}, DType::bf16, DType::bf16}, at, at}};
    });
  }
  add("cast f32 to bf16 (counts the f32)", false, [=](int thread) {
    const std::uint64_t at = static_cast<std::uint64_t>(thread) * half;
    const auto count = static_cast<Index>(half / 4);
    return std::vector<Region>{{{{count}, {1}, {1}, DType::f32, DType::bf16}, at, at / 2}};
  });
  volatile std::uint64_t sink = 0;
  contenders.push_back({"digest of bf16", [&](int thread) {
                          const auto count = static_cast<Index>(half / 2);
                          sink = digest_of_box(
                              {count}, Box::whole({count}), DType::bf16,
                              source.data() + static_cast<std::uint64_t>(thread) * half, {1});
                        }});
  // In turns, so that a busy machine is busy for all of them; the best of each counts.
  for (int round = 0; round < rounds; ++round) {
    for (Contender& contender : contenders) {
      contender.best_seconds = std::min(contender.best_seconds, seconds_of(contender.body));
    }
  }
  std::printf("%llu MiB, %d threads, best of %d rounds\n",
              static_cast<unsigned long long>(bytes / kMiB), kThreads, rounds);
  std::printf("%-40s %8s %10s\n", "", "GB/s", "of memcpy");
  for (const Contender& contender : contenders) {
    std::printf("%-40s %8.2f %10.2f\n", contender.name.c_str(),
                static_cast<double>(bytes) / contender.best_seconds / 1e9,
                contenders.front().best_seconds / contender.best_seconds);
  }
}

}  // namespace
}  // namespace m2n

/// bench_copy [MiB [rounds]]
int main(int argc, char** argv) {
  try {
    const auto number = [&](int i, std::uint64_t otherwise) {
      return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
    };
    const std::uint64_t mib = number(1, 1024);
    const std::uint64_t rounds = number(2, 5);
    if (argc > 3 || mib == 0 || mib % 64 != 0 || rounds == 0 || rounds > 1000) {
      std::fputs("usage: bench_copy [MiB, a multiple of 64 [rounds, 1 to 1000]]\n", stderr);
      return 2;
    }
    m2n::run(mib * m2n::kMiB, static_cast<int>(rounds));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_copy: %s\n", error.what());
    return 1;
  }
}
