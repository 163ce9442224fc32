// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/blocks.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/changes.hpp"
#include "core/tensor/copy_quantised.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kCacheLine = 64;
/// Elements that are looked at, or staged, at a time.
constexpr Index kBlockElements = 1 << 16;
constexpr Index kStagedBytes = 32 << 20;

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
  void copy(const StridedCopy& region, const LocalBuffer& from,
            const LocalBuffer& to) const override {
    m2n::copy_region(region, from.data, to.data);
  }
  void block_scales(std::span<const ScalesOf> boxes) const override {
    for (const auto& [placed, scales] : boxes) {
      m2n::block_scales(placed.box, scales.blocks, placed.dtype, placed.at.data, placed.strides,
                        scales.at.data, scales.strides);
    }
  }
  void quantise(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& scales,
                const LocalBuffer& to) const override {
    m2n::copy_region(region, from.data, to.data, false, scales.data);
  }
  void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                      const LocalBuffer& to, const Strides& strides) const override {
    m2n::fill_synthetic(shape, box, dtype, seed, to.data, strides);
  }
  void change(std::span<const PlacedBox> boxes, std::uint64_t from,
              std::uint64_t to) const override {
    for (const PlacedBox& placed : boxes) {
      change_values(placed.shape, placed.box, placed.dtype, from, to, placed.at.data,
                    placed.strides);
    }
  }
  std::vector<Wrong> compare(std::span<const FormulaBox> boxes) const override {
    std::vector<Wrong> found;
    found.reserve(boxes.size());
    for (const FormulaBox& entry : boxes) {
      found.push_back(compare_one(entry.placed, entry.formula));
    }
    return found;
  }
  std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes) const override {
    std::vector<std::uint64_t> sums;
    sums.reserve(boxes.size());
    for (const DigestOf& entry : boxes) {
      const PlacedBox& placed = entry.placed;
      std::uint64_t& sum = sums.emplace_back(0);
      if (entry.as == placed.dtype) {
        sum = m2n::digest_of_box(placed.shape, placed.box, placed.dtype, placed.at.data,
                                 placed.strides);
        continue;
      }
      for_each_block(placed.box, kBlockElements, [&](const Box& block) {
        const std::vector<std::byte> bytes = can_quantise(placed.dtype, entry.as)
                                                 ? quantised_copy(entry, block)
                                                 : compact_copy(placed, block, entry.as);
        sum += m2n::digest_of_box(placed.shape, block, entry.as, bytes.data(),
                                  row_major(block.extents()));
      });
    }
    return sums;
  }

 private:
  static Wrong compare_one(const PlacedBox& placed, const Formula& formula) {
    Wrong wrong;
    std::uint64_t number = 0;
    for_each_block(placed.box, kBlockElements, [&](const Box& block) {
      const auto count = static_cast<std::uint64_t>(block.volume());
      const std::uint64_t item = bytes_of(placed.dtype);
      const Strides compact = row_major(block.extents());
      std::vector<std::byte> expected(count * bytes_of(formula.dtype));
      m2n::fill_synthetic(placed.shape, block, formula.dtype, formula.seed, expected.data(),
                          compact);
      change_values(placed.shape, block, formula.dtype, 0, formula.version, expected.data(),
                    compact);
      expected = cast(std::move(expected), formula.dtype, placed.dtype, count);
      const std::vector<std::byte> actual = compact_copy(placed, block, placed.dtype);
      for (std::uint64_t i = 0; i < count; ++i) {
        if (std::memcmp(&actual[i * item], &expected[i * item], item) != 0) {
          wrong.first = wrong.count++ == 0 ? number + i : wrong.first;
        }
      }
      number += count;
    });
    return wrong;
  }
  static std::vector<std::byte> cast(std::vector<std::byte> elements, DType from, DType to,
                                     std::uint64_t count) {
    if (from == to) {
      return elements;
    }
    std::vector<std::byte> out(count * bytes_of(to));
    cast_elements(from, elements.data(), to, out.data(), count);
    return out;
  }
  /// The elements of a part of a box that is quantised.
  static std::vector<std::byte> quantised_copy(const DigestOf& entry, const Box& part) {
    const PlacedBox& placed = entry.placed;
    const PlacedScales& scales = entry.scales;
    std::vector<std::byte> out(static_cast<std::size_t>(part.volume()));
    const auto item = static_cast<Index>(bytes_of(placed.dtype));
    const Index first = element_offset(placed.box.lo, part.lo, placed.strides);
    const Index first_scale = element_offset(
        Dims::filled(part.rank(), 0), scale_box(placed.box, scales.blocks).lo, scales.strides);
    for (const QuantisedPart& regular :
         quantised_parts(part, placed.dtype, placed.strides, row_major(part.extents()),
                         scales.blocks, scales.strides)) {
      m2n::copy_region(
          regular.copy, placed.at.data + (first + regular.source_offset) * item,
          out.data() + regular.destination_offset, false,
          scales.at.data + (regular.scale_offset - first_scale) * Index{sizeof(float)});
    }
    return out;
  }
  /// The elements of a part of @p placed, cast.
  static std::vector<std::byte> compact_copy(const PlacedBox& placed, const Box& part, DType as) {
    const Shape extents = part.extents();
    std::vector<std::byte> out(static_cast<std::uint64_t>(part.volume()) * bytes_of(as));
    const Index offset = element_offset(placed.box.lo, part.lo, placed.strides);
    m2n::copy_region({extents, placed.strides, row_major(extents), placed.dtype, as},
                     placed.at.data + offset * static_cast<Index>(bytes_of(placed.dtype)),
                     out.data());
    return out;
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

std::unique_ptr<CopyQueue> Memory::copy_queue(int /*device*/) const {
  return make_plain_copy_queue();
}

std::shared_ptr<void> Memory::pin(std::span<std::byte> /*host*/) const { return nullptr; }

std::uint64_t Memory::digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                    const LocalBuffer& from, const Strides& strides) const {
  const DigestOf one{{shape, box, dtype, from, strides}, dtype};
  return digests({&one, 1}).front();
}

void Memory::change(const PlacedBox& placed, std::uint64_t from, std::uint64_t to) const {
  change(std::span(&placed, 1), from, to);
}

Wrong Memory::compare(const PlacedBox& placed, const Formula& formula) const {
  const FormulaBox one{placed, formula};
  return compare({&one, 1}).front();
}

std::string_view to_string(MemorySpace space) {
  switch (space) {
    case MemorySpace::host:
      return "host";
    case MemorySpace::device:
      return "device";
  }
  return "unknown";
}

void copy_region(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& to) {
  const bool host = from.space == MemorySpace::host;
  memory_of(host ? to : from).copy(region, from, to);
}

std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes) {
  const auto space_of = [](const DigestOf& box) { return box.placed.at.space; };
  if (boxes.empty()) {
    return {};
  }
  if (std::all_of(boxes.begin(), boxes.end(),
                  [&](const DigestOf& box) { return space_of(box) == space_of(boxes.front()); })) {
    return memory_of(space_of(boxes.front())).digests(boxes);
  }
  std::vector<std::uint64_t> sums(boxes.size());
  for (const MemorySpace space : {MemorySpace::host, MemorySpace::device}) {
    std::vector<DigestOf> here;
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      if (space_of(boxes[i]) == space) {
        here.push_back(boxes[i]);
        numbers.push_back(i);
      }
    }
    if (here.empty()) {
      continue;
    }
    const std::vector<std::uint64_t> found = memory_of(space).digests(here);
    for (std::size_t i = 0; i < found.size(); ++i) {
      sums[numbers[i]] = found[i];
    }
  }
  return sums;
}

void change(std::span<const PlacedBox> boxes, std::uint64_t from, std::uint64_t to) {
  // Runs of one kind of memory: nearly always one.
  while (!boxes.empty()) {
    const MemorySpace space = boxes.front().at.space;
    const auto end = std::find_if(boxes.begin(), boxes.end(), [&](const PlacedBox& placed) {
      return placed.at.space != space;
    });
    const auto count = static_cast<std::size_t>(end - boxes.begin());
    memory_of(space).change(boxes.first(count), from, to);
    boxes = boxes.subspan(count);
  }
}

LocalBuffer host_buffer(std::byte* data, std::uint64_t bytes) {
  return {data, bytes, MemorySpace::host, 0};
}

void write_values(const TensorValues& values, const TensorInfo& tensor, const Box& box,
                  const LocalBuffer& to, const Strides& strides) {
  if (to.space == MemorySpace::host) {
    values.read(tensor.name, box, to.data, strides);
    return;
  }
  const Memory& memory = memory_of(to);
  if (const auto formula = values.formula(tensor.name); formula && formula->dtype == tensor.dtype) {
    memory.fill_synthetic(tensor.shape, box, tensor.dtype, formula->seed, to, strides);
    if (formula->version != 0) {
      memory.change({tensor.shape, box, tensor.dtype, to, strides}, 0, formula->version);
    }
    return;
  }
  const auto item = static_cast<Index>(bytes_of(tensor.dtype));
  std::vector<std::byte> staged;
  for_each_block(box, kStagedBytes / item, [&](const Box& block) {
    const Shape extents = block.extents();
    const Strides compact = row_major(extents);
    staged.resize(static_cast<std::size_t>(block.volume() * item));
    values.read(tensor.name, block, staged.data(), compact);
    // Strides may lead back, so the part need not begin inside of what `to` says it has.
    LocalBuffer part = to;
    part.data += element_offset(box.lo, block.lo, strides) * item;
    memory.copy({extents, compact, strides, tensor.dtype, tensor.dtype},
                host_buffer(staged.data(), staged.size()), part);
  });
}

void provide_device_memory(std::unique_ptr<const Memory> memory) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Memory* const known = device_memory().load();
  if (known == nullptr || known->device_count() == 0) {
    device_memory().store(memory.release());  // the former may be in use
  }
}

}  // namespace m2n
