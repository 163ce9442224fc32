// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/memory.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/blocks.hpp"
#include "transports/nccl/copy_queue.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/lane.hpp"
#include "transports/nccl/memory_arena.hpp"
#include "transports/nccl/tables.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

constexpr std::uint64_t kDigestsAtOnce = 1 << 16;
/// Boxes that are changed or compared before the host waits for them.
constexpr std::uint64_t kBoxesAtOnce = 1 << 16;
static_assert(kBoxesAtOnce * sizeof(WrongWords) <= kScratchBytes);
static_assert(kDigestsAtOnce * (sizeof(DigestTask) + sizeof(std::uint64_t)) <= kScratchBytes);

constexpr std::uint64_t kScaleTasksAtOnce = kScratchBytes / sizeof(ScaleTask);

/// Between device addresses.
void queue_copy(const CopyView& view, const Lane& lane) {
  if (!is_plain(view)) {
    launch_copy(view, lane.stream());
    return;
  }
  check(cudaMemcpyAsync(reinterpret_cast<void*>(view.destination),
                        reinterpret_cast<const void*>(view.source), view.count * view.source_bytes,
                        cudaMemcpyDeviceToDevice, lane.stream()),
        "copy device memory");
}

/// The part @p part of @p region, with one side compact.
StridedCopy compact_source(const StridedCopy& region, const Box& part) {
  const Shape extents = part.extents();
  return {extents, row_major(extents), region.destination_strides, region.source_dtype,
          region.destination_dtype};
}
StridedCopy compact_destination(const StridedCopy& region, const Box& part) {
  const Shape extents = part.extents();
  return {extents, region.source_strides, row_major(extents), region.source_dtype,
          region.destination_dtype};
}

std::byte* place_of(std::byte* base, const Strides& strides, const Box& part,
                    std::uint64_t item_bytes) {
  return base + element_offset(Dims::filled(part.rank(), 0), part.lo, strides) *
                    static_cast<Index>(item_bytes);
}

/// From a device to the host: packed and cast there, and spread out here.
void copy_down(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& to) {
  const Turn turn(from.device);
  const std::uint64_t item = region.destination_item_bytes();
  const auto most = static_cast<Index>(kScratchBytes / item);
  std::vector<std::byte> staged;
  for_each_block(Box::whole(region.extents), most, [&](const Box& part) {
    const StridedCopy pack = compact_destination(region, part);
    std::byte* const source =
        place_of(from.data, region.source_strides, part, region.source_item_bytes());
    std::byte* const target = place_of(to.data, region.destination_strides, part, item);
    const auto bytes = static_cast<std::uint64_t>(part.volume()) * item;
    const StridedCopy spread{pack.extents, pack.destination_strides, region.destination_strides,
                             region.destination_dtype, region.destination_dtype};
    const bool direct = is_plain(copy_view(spread, nullptr, nullptr));
    if (!direct) {
      staged.resize(bytes);
    }
    const CopyView view = copy_view(pack, source, turn->scratch());
    const void* packed = source;
    if (!is_plain(view)) {
      launch_copy(view, turn->stream());
      packed = turn->scratch();
    }
    check(cudaMemcpyAsync(direct ? target : staged.data(), packed, bytes, cudaMemcpyDeviceToHost,
                          turn->stream()),
          "read device memory");
    turn->finish("read device memory");
    if (!direct) {
      copy_region(spread, staged.data(), target);
    }
  });
}

/// From the host to a device: packed here, and cast and spread out there.
void copy_up(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& to) {
  const Turn turn(to.device);
  const std::uint64_t item = region.source_item_bytes();
  const auto most = static_cast<Index>(kScratchBytes / item);
  std::vector<std::byte> staged;
  for_each_block(Box::whole(region.extents), most, [&](const Box& part) {
    const StridedCopy spread = compact_source(region, part);
    const std::byte* packed = place_of(from.data, region.source_strides, part, item);
    std::byte* const target =
        place_of(to.data, region.destination_strides, part, region.destination_item_bytes());
    const auto bytes = static_cast<std::uint64_t>(part.volume()) * item;
    const StridedCopy pack{spread.extents, region.source_strides, spread.source_strides,
                           region.source_dtype, region.source_dtype};
    if (!is_plain(copy_view(pack, nullptr, nullptr))) {
      staged.resize(bytes);
      copy_region(pack, packed, staged.data());
      packed = staged.data();
    }
    const CopyView view = copy_view(spread, turn->scratch(), target);
    const bool direct = is_plain(view);
    check(cudaMemcpyAsync(direct ? target : turn->scratch(), packed, bytes, cudaMemcpyHostToDevice,
                          turn->stream()),
          "write device memory");
    if (!direct) {
      launch_copy(view, turn->stream());
    }
    turn->finish("write device memory");
  });
}

class CudaMemory final : public Memory {
 public:
  std::string_view name() const noexcept override { return "cuda"; }

  int device_count() const override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return count;
  }

  std::string description(int device) const override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "ask for a device's name");
    int driver = 0;
    int runtime = 0;
    check(cudaDriverGetVersion(&driver), "ask for the driver's version");
    check(cudaRuntimeGetVersion(&runtime), "ask for CUDA's version");
    const auto dotted = [](int version) {
      return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    return std::string(properties.name) + ", driver " + dotted(driver) + ", CUDA " +
           dotted(runtime);
  }

  std::unique_ptr<Arena> reserve(std::uint64_t bytes, int device) const override {
    return reserve_arena(device, bytes);
  }

  std::uint64_t free_bytes(int device) const override {
    const DeviceGuard guard(device);
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "ask for free device memory");
    return free;
  }

  void write(const LocalBuffer& to, std::span<const std::byte> from) const override {
    expects(from.size() <= to.bytes, "bytes that fit the buffer");
    if (from.empty()) {
      return;
    }
    const Turn turn(to.device);
    check(
        cudaMemcpyAsync(to.data, from.data(), from.size(), cudaMemcpyHostToDevice, turn->stream()),
        "write device memory");
    turn->finish("write device memory");
  }

  void read(const LocalBuffer& from, std::span<std::byte> to) const override {
    expects(to.size() <= from.bytes, "bytes that the buffer has");
    if (to.empty()) {
      return;
    }
    const Turn turn(from.device);
    check(cudaMemcpyAsync(to.data(), from.data, to.size(), cudaMemcpyDeviceToHost, turn->stream()),
          "read device memory");
    turn->finish("read device memory");
  }

  void zero(const LocalBuffer& buffer) const override {
    if (buffer.bytes == 0) {
      return;
    }
    const Turn turn(buffer.device);
    check(cudaMemsetAsync(buffer.data, 0, buffer.bytes, turn->stream()), "zero device memory");
    turn->finish("zero device memory");
  }

  void copy(const StridedCopy& region, const LocalBuffer& from,
            const LocalBuffer& to) const override {
    if (element_count(region.extents) == 0) {
      return;
    }
    if (from.space == MemorySpace::host) {
      copy_up(region, from, to);
    } else if (to.space == MemorySpace::host) {
      copy_down(region, from, to);
    } else {
      const Turn turn(to.device);
      queue_copy(copy_view(region, from.data, to.data), *turn);
      turn->finish("copy device memory");
    }
  }

  void block_scales(std::span<const ScalesOf> boxes) const override {
    constexpr const char* kDoing = "compute the scales of blocks";
    std::map<int, std::vector<ScaleTask>> by_device;
    for (const ScalesOf& box : boxes) {
      std::vector<ScaleTask>& tasks = by_device[box.placed.at.device];
      const std::uint64_t first =
          tasks.empty() ? 0 : tasks.back().first_scale + scale_count(tasks.back());
      if (!box.placed.box.empty()) {
        tasks.push_back(scale_task(box, first));
      }
    }
    for (const auto& [device, tasks] : by_device) {
      const Turn turn(device);
      auto* const table = reinterpret_cast<ScaleTask*>(turn->scratch());
      for (std::size_t begin = 0; begin < tasks.size(); begin += kScaleTasksAtOnce) {
        const std::size_t count = std::min<std::size_t>(kScaleTasksAtOnce, tasks.size() - begin);
        std::vector<ScaleTask> some(tasks.begin() + static_cast<std::ptrdiff_t>(begin),
                                    tasks.begin() + static_cast<std::ptrdiff_t>(begin + count));
        const std::uint64_t first = some.front().first_scale;
        for (ScaleTask& task : some) {
          task.first_scale -= first;
        }
        check(cudaMemcpyAsync(table, some.data(), count * sizeof(ScaleTask), cudaMemcpyHostToDevice,
                              turn->stream()),
              kDoing);
        launch_block_scales(table, count, some.back().first_scale + scale_count(some.back()),
                            turn->stream());
        turn->finish(kDoing);
      }
    }
  }

  void quantise(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& scales,
                const LocalBuffer& to) const override {
    if (element_count(region.extents) == 0) {
      return;
    }
    const Turn turn(to.device);
    launch_copy(copy_view(region, from.data, to.data, scales.data), turn->stream());
    turn->finish("quantise device memory");
  }

  void copy(const LocalBuffer& from, const LocalBuffer& to) const override {
    expects(from.bytes <= to.bytes, "bytes that fit the buffer");
    if (from.device != to.device) {
      const DeviceGuard guard(to.device);
      check(cudaDeviceSynchronize(), "copy device memory");
    }
    const DeviceGuard guard(from.device);
    if (from.device != to.device) {
      // Without it the driver copies in steps, through the host; a device that cannot stays so.
      (void)cudaDeviceEnablePeerAccess(to.device, 0);
      (void)cudaGetLastError();
    }
    check(cudaDeviceSynchronize(), "copy device memory");
    if (from.bytes > 0) {
      check(cudaMemcpyAsync(to.data, from.data, from.bytes, cudaMemcpyDeviceToDevice),
            "copy device memory");
    }
    check(cudaDeviceSynchronize(), "copy device memory");
  }

  std::unique_ptr<CopyQueue> copy_queue(int device) const override {
    return make_copy_queue(device);
  }

  LocalBuffer allocation_of(const LocalBuffer& buffer) const override {
    const Allocation all = nccl::allocation_of(buffer.data, "a buffer");
    return {reinterpret_cast<std::byte*>(all.base), all.bytes, MemorySpace::device, all.device};
  }

  std::shared_ptr<void> pin(std::span<std::byte> host) const override {
    if (host.empty()) {
      return nullptr;
    }
    const cudaError_t result = cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable);
    cudaGetLastError();
    if (result == cudaErrorHostMemoryAlreadyRegistered) {
      return {host.data(), [](void*) {}};
    }
    if (result != cudaSuccess) {
      return nullptr;
    }
    return {host.data(), [](void* data) { cudaHostUnregister(data); }};
  }

  int exchange_current_device(int device) const noexcept override {
    int former = device;
    if (cudaGetDevice(&former) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) {
      cudaGetLastError();  // whoever needs the device says so
    }
    return former;
  }

  void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                      const LocalBuffer& to, const Strides& strides) const override {
    const Turn turn(to.device);
    launch_fill(element_view(shape, box, dtype, to.data, strides), value_rule({dtype, seed, 0}),
                turn->stream());
    turn->finish("fill device memory");
  }

  void change(std::span<const PlacedBox> boxes, std::uint64_t from,
              std::uint64_t to) const override {
    each_part(
        boxes, [](const PlacedBox& placed) { return placed.at.device; },
        [&](int device, std::span<const PlacedBox> part, std::size_t /*first*/) {
          const Turn turn(device);
          for (const PlacedBox& placed : part) {
            launch_change(element_view(placed), value_rule({placed.dtype, 0, 0}).changeable, from,
                          to, turn->stream());
          }
          turn->finish("change device memory");
        });
  }

  std::vector<Wrong> compare(std::span<const FormulaBox> boxes) const override {
    std::vector<Wrong> found(boxes.size());
    each_part(
        boxes, [](const FormulaBox& entry) { return entry.placed.at.device; },
        [&](int device, std::span<const FormulaBox> part, std::size_t first) {
          const Turn turn(device);
          std::vector<WrongWords> words(part.size(), {0, ~std::uint64_t{0}});
          const std::uint64_t bytes = words.size() * sizeof(WrongWords);
          auto* const there = reinterpret_cast<WrongWords*>(turn->scratch());
          check(cudaMemcpyAsync(there, words.data(), bytes, cudaMemcpyHostToDevice, turn->stream()),
                "compare device memory");
          for (std::size_t i = 0; i < part.size(); ++i) {
            const auto& [placed, formula] = part[i];
            launch_compare(element_view(placed), value_rule(formula),
                           convert_of(formula.dtype, placed.dtype), there + i, turn->stream());
          }
          check(cudaMemcpyAsync(words.data(), there, bytes, cudaMemcpyDeviceToHost, turn->stream()),
                "compare device memory");
          turn->finish("compare device memory");
          for (std::size_t i = 0; i < part.size(); ++i) {
            found[first + i] = {words[i].count, words[i].first};
          }
        });
    return found;
  }

  std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes) const override {
    std::vector<std::uint64_t> sums(boxes.size());
    std::map<int, DigestTasks> by_device;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      DigestTasks& tasks = by_device[boxes[i].placed.at.device];
      append_digest_tasks(boxes[i], tasks.tasks);
      tasks.box_of.resize(tasks.tasks.size(), i);
    }
    for (auto& [device, all] : by_device) {
      for (std::size_t begin = 0; begin < all.tasks.size(); begin += kDigestsAtOnce) {
        const std::size_t count = std::min<std::size_t>(kDigestsAtOnce, all.tasks.size() - begin);
        digest_some(device, std::span(all.tasks).subspan(begin, count),
                    std::span(all.box_of).subspan(begin, count), sums);
      }
    }
    return sums;
  }

 private:
  /// Calls @p run(device, boxes, number of the first) for runs of boxes of one device, each short
  /// enough for the scratch memory.
  template <class Entry, class DeviceOf, class Run>
  static void each_part(std::span<const Entry> boxes, DeviceOf device_of, Run run) {
    std::size_t first = 0;
    while (first < boxes.size()) {
      const int device = device_of(boxes[first]);
      std::size_t end = first + 1;
      while (end < boxes.size() && end - first < kBoxesAtOnce && device_of(boxes[end]) == device) {
        ++end;
      }
      run(device, boxes.subspan(first, end - first), first);
      first = end;
    }
  }

  struct DigestTasks {
    std::vector<DigestTask> tasks;
    std::vector<std::size_t> box_of;  ///< [task]
  };

  /// One launch for tasks of one device.
  static void digest_some(int device, std::span<DigestTask> tasks,
                          std::span<const std::size_t> box_of, std::vector<std::uint64_t>& sums) {
    std::uint64_t chunks = 0;
    for (DigestTask& task : tasks) {
      task.first_chunk = chunks;
      chunks += (task.box.count + kDigestChunk - 1) / kDigestChunk;
    }
    const Turn turn(device);
    const std::uint64_t table_bytes = tasks.size() * sizeof(DigestTask);
    const std::uint64_t sum_bytes = tasks.size() * sizeof(std::uint64_t);
    std::byte* const table = turn->scratch();
    std::byte* const results = table + table_bytes;
    std::vector<std::uint64_t> found(tasks.size());
    constexpr const char* kDoing = "digest device memory";
    check(cudaMemcpyAsync(table, tasks.data(), table_bytes, cudaMemcpyHostToDevice, turn->stream()),
          kDoing);
    check(cudaMemsetAsync(results, 0, sum_bytes, turn->stream()), kDoing);
    launch_digests(reinterpret_cast<const DigestTask*>(table), tasks.size(), chunks,
                   reinterpret_cast<std::uint64_t*>(results), turn->stream());
    check(cudaMemcpyAsync(found.data(), results, sum_bytes, cudaMemcpyDeviceToHost, turn->stream()),
          kDoing);
    turn->finish(kDoing);
    for (std::size_t k = 0; k < found.size(); ++k) {
      sums[box_of[k]] += found[k];
    }
  }
};

}  // namespace

void provide_cuda_memory() { provide_device_memory(std::make_unique<CudaMemory>()); }

}  // namespace m2n::nccl
