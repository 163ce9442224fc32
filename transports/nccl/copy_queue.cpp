// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/copy_queue.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <vector>

#include "core/api/memory.hpp"
#include "core/error.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/engine.hpp"
#include "transports/nccl/kernels.hpp"
#include "transports/nccl/tables.hpp"

namespace m2n::nccl {
namespace {

/// Runs of a list are copied one by one from this mean size on: the pause between two plain copies
/// is then small beside them.
constexpr std::uint64_t kPlainBytes = 512 << 10;
constexpr std::size_t kLanes = 2;
constexpr std::uint64_t kTableAlign = 256;

/// What a list does, with offsets instead of addresses on the staging's side.
struct QueuedList {
  enum class Way : std::uint8_t { plain, kernel, host };

  Way way = Way::plain;
  bool pack = false;
  bool within = false;  ///< Both ends are buffers.
  std::size_t lane = 0;
  std::vector<Placed> regions = {};  ///< Until compile(), and for plain copies.
  ListSlice slice = {};
  std::optional<EngineBatch> engine = {};  ///< Beside the slice, of a list within.
  std::uint64_t staged_bytes = 0;          ///< Extent in the staging.
  CopyQueue::List host_list = 0;
};

/// A region that is one run of bytes on both sides.
bool is_run_of_bytes(const Placed& region) {
  const StridedCopy& copy = region.copy;
  return copy.source_dtype == copy.destination_dtype &&
         (copy.extents.empty() || (copy.extents.size() == 1 && copy.source_strides[0] == 1 &&
                                   copy.destination_strides[0] == 1));
}

std::uint64_t address_of(const LocalBuffer& buffer) {
  return reinterpret_cast<std::uint64_t>(buffer.data);
}

class CudaCopyQueue final : public CopyQueue {
 public:
  explicit CudaCopyQueue(int device) : device_(device), host_(make_plain_copy_queue()) {
    const DeviceGuard guard(device);
    load_kernels();
    check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device),
          "ask for a device's size");
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "ask for priorities of streams");
    for (Lane& lane : lanes_) {
      check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest),
            "create a stream");
    }
    engine_.emplace();
    engine_done_.emplace();
    control_memory_ = DeviceMemory(sizeof(ControlHead));
    control_.head = reinterpret_cast<ControlHead*>(control_memory_.data());
  }

  ~CudaCopyQueue() override {
    int former = 0;
    cudaGetDevice(&former);
    cudaSetDevice(device_);
    for (Lane& lane : lanes_) {
      if (lane.stream != nullptr) {
        cudaStreamSynchronize(lane.stream);
        cudaStreamDestroy(lane.stream);
      }
      for (const auto& [number, event] : lane.under_way) {
        cudaEventDestroy(event);
      }
      for (const cudaEvent_t event : lane.free) {
        cudaEventDestroy(event);
      }
    }
    cudaSetDevice(former);
  }

  List add_pack(std::span<const StagedCopy> copies) override { return add_staged(copies, true); }
  List add_unpack(std::span<const StagedCopy> copies) override { return add_staged(copies, false); }

  List add_copies(std::span<const PlacedCopy> copies) override {
    QueuedList list{.within = true};
    for (const PlacedCopy& entry : copies) {
      if (!is_here(entry.from) || !is_here(entry.to) || !has_scales_here(entry)) {
        return add(on_host(host_->add_copies(copies)));
      }
      list.regions.push_back({simplify(entry.copy), address_of(entry.from), address_of(entry.to),
                              address_of(entry.scales)});
    }
    return add(std::move(list));
  }

  void compile() override {
    const DeviceGuard guard(device_);
    std::uint64_t most = 0;
    for (const QueuedList& list : lists_) {
      if (list.way == QueuedList::Way::kernel && !list.within) {
        most = std::max(most, list.staged_bytes);
      }
    }
    scratch_bytes_ = (most + kTableAlign - 1) / kTableAlign * kTableAlign;
    scratch_ = DeviceMemory(kLanes * scratch_bytes_);
    Tables tables;
    for (QueuedList& list : lists_) {
      if (list.way != QueuedList::Way::kernel) {
        continue;
      }
      if (list.within) {
        Division division = divide(std::move(list.regions), EngineModel{});
        if (!division.engine.empty()) {
          list.engine.emplace(division.engine, false);
        }
        list.regions = std::move(division.list);
      } else {
        const auto base = reinterpret_cast<std::uint64_t>(scratch_of(list));
        for (Placed& region : list.regions) {
          (list.pack ? region.destination : region.source) += base;
        }
      }
      list.slice = append_list(list.regions, tables);
      list.regions = {};
    }
    const std::uint64_t task_bytes =
        (tables.tasks.size() * sizeof(Task) + kTableAlign - 1) / kTableAlign * kTableAlign;
    const std::uint64_t loop_bytes = tables.loops.size() * sizeof(Loop);
    tables_memory_ = DeviceMemory(task_bytes + loop_bytes);
    std::byte* const at = tables_memory_.data();
    if (!tables.tasks.empty()) {
      check(cudaMemcpy(at, tables.tasks.data(), tables.tasks.size() * sizeof(Task),
                       cudaMemcpyHostToDevice),
            "bring lists to the device");
    }
    if (loop_bytes > 0) {
      check(cudaMemcpy(at + task_bytes, tables.loops.data(), loop_bytes, cudaMemcpyHostToDevice),
            "bring lists to the device");
    }
    tables_ = {reinterpret_cast<const Task*>(at), reinterpret_cast<const Loop*>(at + task_bytes)};
  }

  Ticket run(List number, std::byte* staging) override {
    QueuedList& list = lists_.at(number);
    if (list.way == QueuedList::Way::host) {
      host_->run(list.host_list, staging);
      return 0;
    }
    const DeviceGuard guard(device_);
    Lane& lane = lanes_[list.lane];
    if (list.way == QueuedList::Way::plain) {
      queue_plain(list, staging, lane.stream);
    } else {
      queue_kernel(list, staging, lane.stream);
    }
    if (list.engine) {
      list.engine->queue(*engine_);
      engine_done_->record(*engine_);
      engine_done_->hold(lane.stream);
    }
    check(cudaGetLastError(), "copy a list of regions");
    return lane.mark() * kLanes + list.lane;
  }

  bool is_done(Ticket ticket) override { return lanes_[ticket % kLanes].is_done(ticket / kLanes); }

  void finish() override {
    const DeviceGuard guard(device_);
    for (Lane& lane : lanes_) {
      check(cudaStreamSynchronize(lane.stream), "copy a list of regions");
    }
  }

  std::uint64_t extra_bytes() const noexcept override {
    return scratch_.bytes() + tables_memory_.bytes() + control_memory_.bytes();
  }

 private:
  /// A stream, and the runs on it, which end in order.
  struct Lane {
    cudaStream_t stream = nullptr;
    std::uint64_t begun = 0;
    std::uint64_t done = 0;
    std::deque<std::pair<std::uint64_t, cudaEvent_t>> under_way;
    std::vector<cudaEvent_t> free;

    std::uint64_t mark() {
      if (free.empty()) {
        free.push_back(nullptr);
        check(cudaEventCreateWithFlags(&free.back(), cudaEventDisableTiming), "create an event");
      }
      check(cudaEventRecord(free.back(), stream), "record an event");
      under_way.emplace_back(++begun, free.back());
      free.pop_back();
      return begun;
    }

    bool is_done(std::uint64_t number) {
      while (done < number && !under_way.empty()) {
        const auto [first, event] = under_way.front();
        const cudaError_t state = cudaEventQuery(event);
        if (state == cudaErrorNotReady) {
          cudaGetLastError();
          break;
        }
        check(state, "copy a list of regions");
        done = first;
        free.push_back(event);
        under_way.pop_front();
      }
      return done >= number;
    }
  };

  bool is_here(const LocalBuffer& buffer) const {
    return buffer.space == MemorySpace::device && buffer.device == device_;
  }

  template <class Copy>
  bool has_scales_here(const Copy& entry) const {
    return !entry.copy.quantises() || is_here(entry.scales);
  }

  static QueuedList on_host(List number) {
    return {.way = QueuedList::Way::host, .host_list = number};
  }

  List add_staged(std::span<const StagedCopy> copies, bool pack) {
    QueuedList list{.pack = pack};
    for (const StagedCopy& entry : copies) {
      if (!is_here(entry.at) || !has_scales_here(entry)) {
        return add(on_host(pack ? host_->add_pack(copies) : host_->add_unpack(copies)));
      }
      const std::uint64_t buffer = address_of(entry.at);
      list.regions.push_back({simplify(entry.copy), pack ? buffer : entry.offset_bytes,
                              pack ? entry.offset_bytes : buffer, address_of(entry.scales)});
      list.staged_bytes =
          std::max(list.staged_bytes, entry.offset_bytes + entry.staged_bytes(pack));
    }
    return add(std::move(list));
  }

  List add(QueuedList list) {
    if (list.way != QueuedList::Way::host) {
      std::erase_if(list.regions, [](const Placed& region) { return region.bytes() == 0; });
      list.regions = merge_adjacent(std::move(list.regions));
      std::uint64_t bytes = 0;
      bool runs = true;
      for (const Placed& region : list.regions) {
        bytes += region.bytes();
        runs = runs && is_run_of_bytes(region);
      }
      const bool plain = !list.within && runs &&
                         (list.regions.size() <= 1 || bytes / list.regions.size() >= kPlainBytes);
      list.way = plain ? QueuedList::Way::plain : QueuedList::Way::kernel;
    }
    list.lane = lists_.size() % kLanes;
    lists_.push_back(std::move(list));
    return lists_.size() - 1;
  }

  std::byte* scratch_of(const QueuedList& list) const {
    return scratch_.data() + list.lane * scratch_bytes_;
  }

  static void queue_plain(const QueuedList& list, std::byte* staging, cudaStream_t stream) {
    const cudaMemcpyKind kind = list.pack ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    const auto base = reinterpret_cast<std::uint64_t>(staging);
    for (const Placed& region : list.regions) {
      const std::uint64_t source = region.source + (list.pack ? 0 : base);
      const std::uint64_t destination = region.destination + (list.pack ? base : 0);
      check(cudaMemcpyAsync(reinterpret_cast<void*>(destination),
                            reinterpret_cast<const void*>(source), region.bytes(), kind, stream),
            "copy device memory");
    }
  }

  void queue_kernel(const QueuedList& list, std::byte* staging, cudaStream_t stream) const {
    std::byte* const scratch = scratch_of(list);
    if (!list.within && !list.pack) {
      check(cudaMemcpyAsync(scratch, staging, list.staged_bytes, cudaMemcpyHostToDevice, stream),
            "write device memory");
    }
    if (list.slice.count > 0) {
      launch_list(control_, tables_, list.slice, {}, {}, processors_, stream);
    }
    if (list.pack) {
      check(cudaMemcpyAsync(staging, scratch, list.staged_bytes, cudaMemcpyDeviceToHost, stream),
            "read device memory");
    }
  }

  int device_;
  int processors_ = 1;
  std::optional<Stream> engine_;
  std::optional<Event> engine_done_;
  std::array<Lane, kLanes> lanes_;
  DeviceMemory control_memory_;
  Control control_;
  DeviceMemory scratch_;
  std::uint64_t scratch_bytes_ = 0;  // of a lane
  DeviceMemory tables_memory_;
  DeviceTables tables_;
  std::unique_ptr<CopyQueue> host_;
  std::vector<QueuedList> lists_;
};

}  // namespace

std::unique_ptr<CopyQueue> make_copy_queue(int device) {
  return std::make_unique<CudaCopyQueue>(device);
}

}  // namespace m2n::nccl
