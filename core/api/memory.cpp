// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kCacheLine = 64;

class HostArena final : public Arena {
 public:
  explicit HostArena(std::uint64_t bytes) : bytes_(bytes) {
    if (bytes > UINT64_MAX - 2 * kCacheLine) {
      throw Error(Errc::unavailable, "no memory for " + std::to_string(bytes) + " bytes");
    }
    // calloc, so that pages that nobody touches cost nothing.
    memory_.reset(std::calloc(bytes + kCacheLine, 1));
    if (memory_ == nullptr) {
      throw Error(Errc::unavailable, "no memory for " + std::to_string(bytes) + " bytes");
    }
    void* aligned = memory_.get();
    std::size_t space = bytes + kCacheLine;
    data_ = static_cast<std::byte*>(std::align(kCacheLine, bytes, aligned, space));
  }

  LocalBuffer take(std::uint64_t bytes, std::uint64_t align) override {
    const std::uint64_t begin = used_ + (align - used_ % align) % align;
    if (begin > bytes_ || bytes > bytes_ - begin) {
      throw Error(Errc::bad_argument, std::to_string(bytes) + " bytes of an arena that has " +
                                          std::to_string(bytes_ - used_) + " left of " +
                                          std::to_string(bytes_));
    }
    used_ = begin + bytes;
    return {data_ + begin, bytes, MemorySpace::host, 0};
  }

 private:
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };

  std::unique_ptr<void, Free> memory_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t used_ = 0;
};

/// The number behind @p key in a file of lines "key number ..."; with an empty key the first word.
std::optional<std::uint64_t> number_in(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    std::uint64_t value = 0;
    if (word == key && in >> value) {
      return value;
    }
    if (key.empty()) {  // "max" where there is no limit
      const bool digits = word.find_first_not_of("0123456789") == word.npos;
      return digits ? std::optional<std::uint64_t>(std::stoull(word)) : std::nullopt;
    }
  }
  return {};
}

/// What the machine has available, or what is left to the control group of a container.
std::uint64_t free_host_bytes() {
  const auto available = number_in("/proc/meminfo", "MemAvailable:");
  std::uint64_t free = available ? *available * 1024 : UINT64_MAX;
  const auto limit = number_in("/sys/fs/cgroup/memory.max", "");
  const auto used = number_in("/sys/fs/cgroup/memory.current", "");
  if (limit && used) {
    const std::uint64_t cache =
        number_in("/sys/fs/cgroup/memory.stat", "inactive_file").value_or(0);
    const std::uint64_t taken = *used - std::min(*used, cache);
    free = std::min(free, *limit - std::min(*limit, taken));
  }
  return free;
}

/// The first processor's name, and how many there are.
std::string processors() {
  std::ifstream in("/proc/cpuinfo");
  std::string name = "processor";
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name") && line.find(':') + 2 < line.size()) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  }
  return std::to_string(std::thread::hardware_concurrency()) + " x " + name;
}

class HostMemory final : public Memory {
 public:
  std::string_view name() const noexcept override { return "host"; }
  int device_count() const override { return 1; }
  std::string description(int /*device*/) const override { return processors(); }

  std::unique_ptr<Arena> reserve(std::uint64_t bytes, int /*device*/) const override {
    return std::make_unique<HostArena>(bytes);
  }
  std::uint64_t free_bytes(int /*device*/) const override { return free_host_bytes(); }
  void write(const LocalBuffer& to, std::span<const std::byte> from) const override {
    expects(from.size() <= to.bytes, "bytes that fit the buffer");
    if (!from.empty()) {
      std::memcpy(to.data, from.data(), from.size());
    }
  }
  void read(const LocalBuffer& from, std::span<std::byte> to) const override {
    expects(to.size() <= from.bytes, "bytes that the buffer has");
    if (!to.empty()) {
      std::memcpy(to.data(), from.data, to.size());
    }
  }
  void zero(const LocalBuffer& buffer) const override {
    if (buffer.bytes > 0) {
      std::memset(buffer.data, 0, buffer.bytes);
    }
  }
  void copy(const LocalBuffer& from, const LocalBuffer& to) const override {
    expects(from.bytes <= to.bytes, "bytes that fit the buffer");
    if (from.bytes > 0) {
      std::memcpy(to.data, from.data, from.bytes);
    }
  }
  void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                      const LocalBuffer& to, const Strides& strides) const override {
    m2n::fill_synthetic(shape, box, dtype, seed, to.data, strides);
  }
  std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype,
                              const LocalBuffer& from, const Strides& strides) const override {
    return m2n::digest_of_box(shape, box, dtype, from.data, strides);
  }
};

std::atomic<const Memory*>& device_memory() {
  static std::atomic<const Memory*> memory{nullptr};
  return memory;
}

}  // namespace

const Memory& memory_of(MemorySpace space) {
  if (space == MemorySpace::host) {
    static const HostMemory kHost;
    return kHost;
  }
  const Memory* memory = device_memory().load();
  if (memory == nullptr) {
    throw Error(
        Errc::unavailable,
        "device memory in a build that knows no device, expected one with transport 'nccl'");
  }
  return *memory;
}

void provide_device_memory(std::unique_ptr<const Memory> memory) {
  const Memory* none = nullptr;
  if (device_memory().compare_exchange_strong(none, memory.get())) {
    (void)memory.release();
  }
}

}  // namespace m2n
