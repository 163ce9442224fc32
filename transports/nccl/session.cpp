// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A round, on the device:
///
///     begin      counts the round up and tells every mapped source "my memory may be written"
///     per stage  gate    holds the main stream until the peers' flags allow the stage
///                list    one launch: local copies, and writes into mapped peers
///                engine  contiguous copies into mapped peers, on their own stream
///                wire    pack, send and receive, unpack, step by step on three streams
///                signal  tells every mapped destination "all of this stage has landed"
///     last gate  holds until everything has landed here, then tells the host
///
/// Flags only grow, so that nothing is reset between rounds. Copies of the engines cannot be called
/// back, so the host queues them once the gate is open; in a captured round they follow the gate.

#include "transports/nccl/session.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "transports/nccl/wire.hpp"

namespace m2n::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollInterval{10};
constexpr std::chrono::seconds kDrainPatience{5};
constexpr std::uint64_t kArenaAlign = 256;
constexpr std::size_t kSmallestBatch = 8;  // below, single calls cost less

/// Memory of this process's sessions by address: ranks that are threads of one process keep each
/// other's alive, so that a late flag never meets freed memory.
class SharedMemories {
 public:
  static SharedMemories& instance() {
    static SharedMemories memories;
    return memories;
  }
  std::shared_ptr<DeviceMemory> make(std::uint64_t bytes) {
    auto memory = std::make_shared<DeviceMemory>(bytes);
    const std::lock_guard lock(mutex_);
    by_address_[reinterpret_cast<std::uint64_t>(memory->data())] = memory;
    return memory;
  }
  std::shared_ptr<DeviceMemory> find(std::uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto found = by_address_.find(address);
    return found == by_address_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<DeviceMemory>> by_address_;
};

/// Words in pinned host memory that kernels reach.
class PinnedWords {
 public:
  PinnedWords() {
    void* data = nullptr;
    check(cudaHostAlloc(&data, sizeof(HostWords), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocate pinned host memory");
    words_ = new (data) HostWords{};
  }
  ~PinnedWords() { cudaFreeHost(words_); }
  PinnedWords(const PinnedWords&) = delete;
  PinnedWords& operator=(const PinnedWords&) = delete;

  HostWords* get() const { return words_; }
  static std::uint64_t read(std::uint64_t& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  }
  static void write(std::uint64_t& word, std::uint64_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
  }

 private:
  HostWords* words_ = nullptr;
};

/// [begin, begin + count) of a table on the device.
struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// Copies of a stage for the engines, as the runtime wants them.
struct EngineBatch {
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<std::size_t> sizes;
  std::vector<EngineCopy> pitched;
#if CUDART_VERSION >= 13000
  std::vector<cudaMemcpy3DBatchOp> wide;  ///< Pitched copies of wide rows: also in one call.
#endif

  explicit EngineBatch(const std::vector<EngineCopy>& copies = {}, bool captured = false) {
    for (const EngineCopy& copy : copies) {
#if CUDART_VERSION >= 13000
      if (!captured && copy.rows > 1 && copy.row_bytes >= kWideRow) {
        wide.push_back(wide_copy(copy));
        continue;
      }
#else
      static_cast<void>(captured);
#endif
      if (copy.rows > 1) {
        pitched.push_back(copy);
        continue;
      }
      targets.push_back(reinterpret_cast<void*>(copy.destination));
      sources.push_back(reinterpret_cast<const void*>(copy.source));
      sizes.push_back(copy.row_bytes);
    }
  }
#if CUDART_VERSION >= 13000
  static constexpr std::uint64_t kWideRow = 64 << 10;

  static cudaMemcpy3DBatchOp wide_copy(const EngineCopy& copy) {
    const auto operand = [](std::uint64_t address, std::uint64_t pitch, std::uint64_t rows) {
      cudaMemcpy3DOperand out{};
      out.type = cudaMemcpyOperandTypePointer;
      out.op.ptr.ptr = reinterpret_cast<void*>(address);
      out.op.ptr.rowLength = pitch;
      out.op.ptr.layerHeight = rows;
      return out;
    };
    cudaMemcpy3DBatchOp op{};
    op.src = operand(copy.source, copy.source_pitch, copy.rows);
    op.dst = operand(copy.destination, copy.destination_pitch, copy.rows);
    op.extent = {copy.row_bytes, copy.rows, 1};
    op.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    op.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    return op;
  }
  bool empty() const { return targets.empty() && pitched.empty() && wide.empty(); }
#else
  bool empty() const { return targets.empty() && pitched.empty(); }
#endif
};

struct Stage {
  Range gates;
  Range signals;
  Range permissions;  ///< Signals to those who write scratch here in a later stage.
  ListSlice list;
  EngineBatch engine;
  std::vector<WireStep> wire;

  bool empty() const { return list.count == 0 && engine.empty() && wire.empty(); }
};

/// A host buffer and its place in device memory.
struct Mirror {
  std::byte* host;
  std::byte* device;
  std::uint64_t bytes;
  bool destination;
};

class NcclSession final : public Session {
 public:
  NcclSession(std::shared_ptr<Connection> connection, const Program& program,
              const Buffers& buffers, Deadline deadline)
      : connection_(std::move(connection)),
        rank_(static_cast<std::size_t>(program.rank)),
        world_(connection_->ranks.size()) {
    expects(static_cast<std::size_t>(program.world_size) <= world_, "a group as large as the plan");
    load_kernels();
    agree_and_map(program, buffers, deadline);
    compile(program);
    report_traffic(program);
    group().barrier("nccl prepare", deadline);
  }

  ~NcclSession() override {
    cudaSetDevice(connection_->device);
    if (running_) {
      abort();
      if (uses_wire_ && connection_->comm) {
        connection_->comm->abort();
      }
    }
    if (!drain()) {
      control_memory_->leak();
      tables_memory_.leak();
      staging_memory_.leak();
    }
    if (graph_ != nullptr) {
      cudaGraphExecDestroy(graph_);
    }
  }

  void start(std::uint64_t version, Deadline deadline) override {
    const auto begin = Clock::now();
    const DeviceGuard guard(connection_->device);
    started_ = begin;
    report_.version = version;
    ++round_;
    running_ = true;
    deadline_ = deadline;
    if (cudaStreamQuery(caller_stream()) != cudaSuccess) {  // something is still under way there
      cudaGetLastError();
      caller_.record(caller_stream());
      caller_.hold(main_);
    }
    copy_mirrors(false);
    if (replays_) {
      if (graph_ == nullptr) {
        capture();
      }
      check(cudaGraphLaunch(graph_, main_), "replay a round");
      next_stage_ = stages_.size() + 1;
    } else {
      ready_due_ = ready_.count > 0;
      ended_ = false;
      next_stage_ = 0;
      head_queued_ = false;
      pump();
    }
    figures_.host_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }

  RoundReport wait(Deadline deadline) override {
    const DeviceGuard guard(connection_->device);
    deadline_ = deadline;
    HostWords& words = *words_.get();
    auto next_poll = Clock::now() + kPollInterval;
    for (std::uint64_t spin = 0;; ++spin) {
      if (next_stage_ <= stages_.size()) {
        pump();
      } else if (PinnedWords::read(words.finished) == round_) {
        break;
      }
      if (PinnedWords::read(words.failed) != 0) {
        fail(Errc::peer_lost, "a rank gave up in round " + std::to_string(round_), true);
      }
      const auto now = Clock::now();
      if (now > deadline) {
        fail(Errc::timed_out, "the deadline passed in round " + std::to_string(round_), true);
      }
      if (now > next_poll) {
        next_poll = now + kPollInterval;
        poll();
      } else if (spin > 2000) {
        std::this_thread::yield();
      }
    }
    if (!mirrors_.empty()) {
      copy_mirrors(true);
      check(cudaStreamSynchronize(main_), "copy buffers to the host");
    }
    running_ = false;
    report_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    return report_;
  }

  void abort() noexcept override {
    PinnedWords::write(words_.get()->abort, 1);
    if (abort_words_ != nullptr) {
      cudaSetDevice(connection_->device);
      launch_abort(abort_words_, abort_count_, side_);
    }
  }

  SessionFigures figures() const { return figures_; }

 private:
  Group& group() const { return *connection_->group; }
  const NcclOptions& options() const { return connection_->options; }
  cudaStream_t caller_stream() const {
    return options().stream == 0 ? cudaStreamLegacy
                                 : reinterpret_cast<cudaStream_t>(options().stream);
  }

  // ---------------------------------------------------------------- who reaches whom

  /// The device address of each of this rank's buffers; host memory gets a mirror.
  void place_buffers(const Program& program, const Buffers& buffers) {
    std::uint64_t mirror_bytes = 0;
    for (const auto* side : {&buffers.source, &buffers.destination}) {
      for (const LocalBuffer& buffer : *side) {
        if (buffer.space == MemorySpace::host && buffer.data != nullptr) {
          mirror_bytes += (buffer.bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
        }
      }
    }
    mirror_memory_ = SharedMemories::instance().make(mirror_bytes);
    std::uint64_t used = 0;
    const auto place = [&](const LocalBuffer& buffer, bool destination, std::size_t index) {
      if (buffer.data == nullptr) {
        return std::uint64_t{0};
      }
      if (buffer.space == MemorySpace::host) {
        std::byte* device = mirror_memory_->data() + used;
        used += (buffer.bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
        mirrors_.push_back({buffer.data, device, buffer.bytes, destination});
        return reinterpret_cast<std::uint64_t>(device);
      }
      cudaPointerAttributes attributes{};
      check(cudaPointerGetAttributes(&attributes, buffer.data), "look at a buffer");
      if (attributes.type != cudaMemoryTypeDevice || attributes.device != connection_->device) {
        throw TransportError(
            Errc::bad_argument,
            "nccl: " + std::string(destination ? "destination" : "source") + " buffer " +
                std::to_string(index) + " of rank " + std::to_string(rank_) +
                (attributes.type == cudaMemoryTypeDevice
                     ? " lies on device " + std::to_string(attributes.device)
                     : std::string(" is no device memory")) +
                ", expected memory of the rank's device " + std::to_string(connection_->device));
      }
      return reinterpret_cast<std::uint64_t>(buffer.data);
    };
    for (std::size_t i = 0; i < buffers.source.size(); ++i) {
      source_.push_back(place(buffers.source[i], false, i));
    }
    for (std::size_t i = 0; i < buffers.destination.size(); ++i) {
      destination_.push_back(place(buffers.destination[i], true, i));
    }
    scratch_memory_ = SharedMemories::instance().make(program.scratch_bytes);
    scratch_ = reinterpret_cast<std::uint64_t>(scratch_memory_->data());
  }

  std::uint64_t address(const Endpoint& end) const {
    std::uint64_t base = scratch_;
    if (end.role == Role::source) {
      base = source_.at(end.buffer);
    } else if (end.role == Role::destination) {
      base = destination_.at(end.buffer);
    }
    expects(base != 0, "a buffer for every region of the program");
    return base + end.offset_bytes;
  }

  std::size_t place_index(const Endpoint& end) const {
    return end.role == Role::scratch ? destination_.size() : end.buffer;
  }

  Advert make_advert(const Program& program) {
    Advert advert;
    std::map<std::uint64_t, std::int64_t> known;
    const auto offer = [&](std::uint64_t at, const std::string& what) {
      const Allocation allocation = allocation_of(reinterpret_cast<const void*>(at), what);
      const auto [found, fresh] =
          known.emplace(allocation.base, static_cast<std::int64_t>(advert.allocations.size()));
      if (fresh) {
        Offer made{allocation, {}};
        if (allocation.exportable &&
            cudaIpcGetMemHandle(&made.handle, reinterpret_cast<void*>(allocation.base)) !=
                cudaSuccess) {
          cudaGetLastError();
          made.allocation.exportable = false;
        }
        advert.allocations.push_back(made);
      }
      return Advert::Place{found->second, at - allocation.base};
    };
    const auto control = reinterpret_cast<std::uint64_t>(control_memory_->data());
    advert.control_offset = offer(control, "the control block").offset;
    advert.places.resize(destination_.size() + 1);
    std::set<Rank> senders;
    std::set<Rank> receivers;
    for (const Region& region : program.receives) {
      senders.insert(region.from.rank);
      Advert::Place& place = advert.places[place_index(region.to)];
      if (place.allocation < 0) {
        const std::uint64_t base =
            region.to.role == Role::scratch ? scratch_ : destination_.at(region.to.buffer);
        expects(base != 0, "a buffer for every region of the program");
        place = offer(base, "a buffer of rank " + std::to_string(rank_));
      }
    }
    for (const Region& region : program.sends) {
      receivers.insert(region.to.rank);
    }
    advert.wire_peers = senders.size() + receivers.size();
    advert.settings = options().shared() + " plan=" + program.plan_digest;
    choose_window(program, advert);
    return advert;
  }

  /// The one allocation that this rank can register: what it receives into, or else one that it
  /// sends from, when there is exactly one and it came from ncclMemAlloc.
  void choose_window(const Program& program, Advert& advert) {
    if (!windows_exist()) {
      return;
    }
    std::set<std::int64_t> targets;
    for (const Advert::Place& place : advert.places) {
      if (place.allocation >= 0) {
        targets.insert(place.allocation);
      }
    }
    if (targets.size() == 1) {
      const Allocation& a =
          advert.allocations[static_cast<std::size_t>(*targets.begin())].allocation;
      if (!a.exportable) {
        window_base_ = a.base;
        advert.window_bytes = a.bytes;
        advert.window_allocation = *targets.begin();
      }
    } else if (targets.empty() && !program.sends.empty()) {
      const Allocation a = allocation_of(
          reinterpret_cast<const void*>(address(program.sends.front().from)), "a source buffer");
      if (!a.exportable) {
        window_base_ = a.base;
        advert.window_bytes = a.bytes;
      }
    }
  }

  /// Every rank's text; throws the first error of any rank, the same one everywhere.
  std::vector<std::string> agree(const char* phase, const std::string& mine, Deadline deadline) {
    std::vector<std::string> all = group().all_gather(phase, mine, deadline);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty() || all[rank][0] != '+') {
        throw TransportError(Errc::bad_argument,
                             "rank " + std::to_string(rank) + ": " +
                                 (all[rank].empty() ? "no answer" : all[rank].substr(1)));
      }
      all[rank].erase(0, 1);
    }
    return all;
  }

  template <class Make>
  static std::string attempt(const Make& make) {
    try {
      return "+" + make();
    } catch (const std::exception& error) {
      return std::string("-") + error.what();
    }
  }

  void agree_and_map(const Program& program, const Buffers& buffers, Deadline deadline) {
    const std::string mine = attempt([&] {
      place_buffers(program, buffers);
      control_bytes_ = sizeof(ControlHead) + 2 * world_ * sizeof(std::uint64_t);
      control_memory_ = SharedMemories::instance().make(control_bytes_);
      return make_advert(program).encode();
    });
    std::vector<Advert> adverts;
    for (const std::string& text : agree("nccl memory", mine, deadline)) {
      adverts.push_back(Advert::decode(text));
    }
    std::uint64_t wire_peers = 1;
    bool windows = windows_exist() && options().path != PathChoice::ipc;
    for (std::size_t rank = 0; rank < world_; ++rank) {
      if (adverts[rank].settings != adverts[0].settings) {
        throw TransportError(Errc::bad_argument, "nccl: rank " + std::to_string(rank) +
                                                     " runs with " + adverts[rank].settings +
                                                     ", expected " + adverts[0].settings +
                                                     " as on rank 0");
      }
      wire_peers = std::max(wire_peers, adverts[rank].wire_peers);
      windows =
          windows && adverts[rank].window_bytes > 0 &&
          (window_sizes_may_differ() || adverts[rank].window_bytes == adverts[0].window_bytes);
    }
    limits_ = {chunk_bytes_for(options().staging_bytes, wire_peers), options().direct_bytes,
               options().step_bytes};

    const auto& ranks = connection_->ranks;
    alone_on_device_ = std::count_if(ranks.begin(), ranks.end(), [&](const Identity& other) {
                         return other.host == ranks[rank_].host && other.bus == ranks[rank_].bus;
                       }) == 1;
    for (const Region& region : program.sends) {
      const auto to = static_cast<std::size_t>(region.to.rank);
      path_to_.try_emplace(
          to, propose_path(ranks[rank_], ranks[to], adverts[to], options().path, windows));
    }
    for (const Region& region : program.receives) {
      const auto from = static_cast<std::size_t>(region.from.rank);
      path_from_.try_emplace(
          from, propose_path(ranks[from], ranks[rank_], adverts[rank_], options().path, windows));
    }
    bool window = false;
    bool wire = false;
    for (const std::string& text : agree("nccl paths", attempt([&] {
                                           return std::string(uses(Path::window) ? "w" : "-") +
                                                  (uses(Path::wire) ? "w" : "-");
                                         }),
                                         deadline)) {
      window = window || text[0] == 'w';
      wire = wire || text[1] == 'w';
    }
    if (window || wire) {
      connect_communicator(deadline);
    }
    if (window) {
      window_ = std::make_unique<Window>(*connection_->comm, reinterpret_cast<void*>(window_base_),
                                         adverts[rank_].window_bytes, deadline);
    }
    map_peers(adverts, deadline);
  }

  bool uses(Path path) const {
    const auto is = [&](const auto& pair) { return pair.second == path; };
    return std::any_of(path_to_.begin(), path_to_.end(), is) ||
           std::any_of(path_from_.begin(), path_from_.end(), is);
  }

  void connect_communicator(Deadline deadline) {
    if (!connection_->comm) {
      connection_->comm =
          std::make_unique<Communicator>(group(), connection_->options.max_cta, deadline);
    }
  }

  /// Maps what the paths promise. A pair that cannot be mapped after all goes by wire, on both
  /// sides.
  void map_peers(const std::vector<Advert>& adverts, Deadline deadline) {
    const auto& ranks = connection_->ranks;
    const auto same_process = [&](std::size_t other) {
      return ranks[other].host == ranks[rank_].host && ranks[other].process == ranks[rank_].process;
    };
    const auto base_of = [&](std::size_t other, std::int64_t allocation) {
      const Offer& offer = adverts[other].allocations[static_cast<std::size_t>(allocation)];
      if (same_process(other)) {
        if (auto memory = SharedMemories::instance().find(offer.allocation.base)) {
          kept_.push_back(std::move(memory));
        }
        return offer.allocation.base;
      }
      auto mapping = connection_->mappings.open(offer);
      const auto base = reinterpret_cast<std::uint64_t>(mapping.get());
      kept_.push_back(std::move(mapping));
      return base;
    };
    std::string failures;
    std::set<std::size_t> peers;
    for (const auto* paths : {&path_to_, &path_from_}) {
      for (const auto& [other, path] : *paths) {
        if (path != Path::wire) {
          peers.insert(other);
        }
      }
    }
    for (const std::size_t other : peers) {
      try {
        control_of_[other] = base_of(other, 0) + adverts[other].control_offset;
        const auto to = path_to_.find(other);
        if (to == path_to_.end() || to->second == Path::wire) {
          continue;
        }
        std::map<std::int64_t, std::uint64_t> bases;
        std::vector<std::uint64_t>& places = places_of_[other];
        for (const Advert::Place& place : adverts[other].places) {
          if (place.allocation < 0) {
            places.push_back(0);
            continue;
          }
          const auto [found, fresh] = bases.emplace(place.allocation, 0);
          if (fresh) {
            found->second = to->second == Path::window ? window_->base_of(static_cast<Rank>(other))
                                                       : base_of(other, place.allocation);
            if (found->second == 0) {
              throw TransportError(Errc::unavailable, "nccl: no window of the peer");
            }
          }
          places.push_back(found->second + place.offset);
        }
      } catch (const TransportError&) {
        failures += std::to_string(rank_) + " " + std::to_string(other) + " ";
      }
    }
    bool wire = false;
    const auto all = agree("nccl mappings", "+" + failures, deadline);
    for (const std::string& text : all) {
      std::istringstream in(text);
      std::size_t a = 0;
      std::size_t b = 0;
      while (in >> a >> b) {
        wire = true;
        for (const auto& [x, y] : {std::pair(a, b), std::pair(b, a)}) {
          if (x == rank_) {
            for (auto* paths : {&path_to_, &path_from_}) {
              if (const auto found = paths->find(y); found != paths->end()) {
                found->second = Path::wire;
              }
            }
            control_of_.erase(y);
          }
        }
      }
    }
    if (wire) {
      connect_communicator(deadline);
    }
    uses_wire_ = uses(Path::wire);
    if (options().graph == GraphChoice::on && uses_wire_) {
      throw TransportError(Errc::bad_argument,
                           "nccl: graph=on, but rank " + std::to_string(rank_) +
                               " has peers that it cannot map, expected mapped peers only");
    }
  }

  // ---------------------------------------------------------------- what a round does

  void compile(const Program& program) {
    struct Work {
      std::vector<Placed> local;
      std::vector<Placed> remote;
      std::map<std::size_t, PairRegions> wire_sends;
      std::map<std::size_t, PairRegions> wire_receives;
      std::set<std::size_t> to;            // mapped
      std::set<std::size_t> from;          // mapped
      std::set<std::size_t> to_scratch;    // of `to`: those whose scratch is written
      std::set<std::size_t> from_scratch;  // of `from`: those that write scratch here

      bool empty() const {
        return local.empty() && remote.empty() && wire_sends.empty() && wire_receives.empty();
      }
    };
    std::vector<Work> work(program.stage_count);
    for (const Region& region : program.copies) {
      if (region.bytes > 0) {
        work[region.stage].local.push_back({region.copy, address(region.from), address(region.to)});
      }
    }
    for (const Region& region : program.sends) {
      if (region.bytes == 0) {
        continue;
      }
      const auto to = static_cast<std::size_t>(region.to.rank);
      Work& stage = work[region.stage];
      const Path path = path_to_.at(to);
      if (path == Path::wire) {
        PairRegions& pair = stage.wire_sends[to];
        pair.peer = region.to.rank;
        pair.regions.push_back({region.copy, address(region.from), 0});
        continue;
      }
      const std::uint64_t target = place_at(to, region.to) + region.to.offset_bytes;
      (path == Path::local ? stage.local : stage.remote)
          .push_back({region.copy, address(region.from), target});
      stage.to.insert(to);
      if (region.to.role == Role::scratch) {
        stage.to_scratch.insert(to);
      }
    }
    for (const Region& region : program.receives) {
      if (region.bytes == 0) {
        continue;
      }
      const auto from = static_cast<std::size_t>(region.from.rank);
      Work& stage = work[region.stage];
      if (path_from_.at(from) == Path::wire) {
        PairRegions& pair = stage.wire_receives[from];
        pair.peer = region.from.rank;
        pair.regions.push_back({region.copy, 0, address(region.to)});
      } else {
        stage.from.insert(from);
        if (region.to.role == Role::scratch) {
          stage.from_scratch.insert(from);
        }
      }
    }

    stride_ = program.stage_count + 1;
    std::vector<Gate> gates;
    std::vector<Signal> signals;
    Tables tables;
    const auto flag_address = [&](std::size_t peer, std::size_t flag) {
      return control_of_.at(peer) + sizeof(ControlHead) + flag * sizeof(std::uint64_t);
    };
    std::set<std::size_t> sources;
    std::map<std::size_t, std::size_t> last_scratch;  // by source: last stage that writes scratch
    std::size_t pairs = 0;
    for (std::size_t s = 0; s < work.size(); ++s) {
      const Work& stage = work[s];
      sources.insert(stage.from.begin(), stage.from.end());
      for (const std::size_t source : stage.from_scratch) {
        last_scratch[source] = s;
      }
      pairs = std::max(pairs, stage.wire_sends.size() + stage.wire_receives.size());
    }
    // Scratch is used over and over: who writes it in a stage must wait until this rank has done
    // all its earlier ones. A permission is the first stage that is not done yet.
    std::vector<std::uint32_t> not_done(work.size() + 1);  // [stage] the first from there on
    not_done.back() = static_cast<std::uint32_t>(work.size());
    for (std::size_t s = work.size(); s-- > 0;) {
      not_done[s] = work[s].empty() ? not_done[s + 1] : static_cast<std::uint32_t>(s);
    }
    for (const std::size_t source : sources) {
      signals.push_back(
          {flag_address(source, rank_), last_scratch.contains(source) ? not_done[0] : 0});
    }
    ready_ = {0, signals.size()};
    Staging staging{0, slot_bytes_for(pairs, limits_)};
    staging_memory_ = DeviceMemory(2 * staging.slot_bytes);
    staging.address = reinterpret_cast<std::uint64_t>(staging_memory_.data());

    EngineModel model = options().engine;
    if (options().graph ==
        GraphChoice::on) {  // nodes of a graph cost an engine more than copies of a batch
      model.min_bytes = std::max<std::uint64_t>(model.min_bytes, 16 << 20);
      model.gap_bytes = std::max<std::uint64_t>(model.gap_bytes, 1'200'000);
      model.alone_bytes = std::max<std::uint64_t>(model.alone_bytes, 128 << 20);
    }
    std::map<std::size_t, std::uint32_t> landed;  // by source: stage that is waited for next
    std::set<std::size_t> allowed;                // destinations whose permission is waited for
    stages_.resize(work.size());
    for (std::size_t s = 0; s < work.size(); ++s) {
      Work& from = work[s];
      Stage& stage = stages_[s];
      const bool works = !from.empty();
      Division division = divide(merge_equal_steps(merge_adjacent(std::move(from.remote))), model);
      std::vector<Placed> list = merge_adjacent(std::move(from.local));
      list.insert(list.end(), std::make_move_iterator(division.list.begin()),
                  std::make_move_iterator(division.list.end()));
      stage.list = append_list(list, tables);
      figures_.engine_copies += division.engine.size();
      stage.engine = EngineBatch(division.engine, options().graph == GraphChoice::on);
      const auto values = [](const std::map<std::size_t, PairRegions>& pairs_of) {
        std::vector<PairRegions> out;
        for (const auto& [peer, pair] : pairs_of) {
          out.push_back(pair);
        }
        return out;
      };
      stage.wire = compile_wire(values(from.wire_sends), values(from.wire_receives), limits_,
                                staging, tables);
      stage.gates.begin = gates.size();
      if (!stage.empty()) {
        for (const auto& [source, next] : landed) {
          gates.push_back({static_cast<std::uint32_t>(world_ + source), next});
        }
        landed.clear();
        for (const std::size_t to : from.to) {
          if (from.to_scratch.contains(to)) {
            allowed.insert(to);
            gates.push_back({static_cast<std::uint32_t>(to), static_cast<std::uint32_t>(s)});
          } else if (allowed.insert(to).second) {
            gates.push_back({static_cast<std::uint32_t>(to), 0});
          }
        }
      }
      stage.gates.count = gates.size() - stage.gates.begin;
      stage.signals.begin = signals.size();
      for (const std::size_t to : from.to) {
        signals.push_back({flag_address(to, world_ + rank_), s + 1});
      }
      stage.signals.count = signals.size() - stage.signals.begin;
      stage.permissions.begin = signals.size();
      for (const auto& [source, last] : last_scratch) {
        if (works && s < last) {
          signals.push_back({flag_address(source, rank_), not_done[s + 1]});
        }
      }
      stage.permissions.count = signals.size() - stage.permissions.begin;
      for (const std::size_t source : from.from) {
        landed[source] = static_cast<std::uint32_t>(s + 1);
      }
    }
    last_gates_.begin = gates.size();
    for (const auto& [source, next] : landed) {
      gates.push_back({static_cast<std::uint32_t>(world_ + source), next});
    }
    last_gates_.count = gates.size() - last_gates_.begin;
    gate_table_ = gates;
    replays_ = options().graph == GraphChoice::on ||
               (options().graph == GraphChoice::automatic &&
                std::all_of(stages_.begin(), stages_.end(), [](const Stage& stage) {
                  return stage.engine.empty() && stage.wire.empty();
                }));
    figures_.list_tasks = tables.tasks.size();
    upload(tables, gates, signals);
  }

  std::uint64_t place_at(std::size_t peer, const Endpoint& end) const {
    const std::vector<std::uint64_t>& places = places_of_.at(peer);
    const std::size_t index = end.role == Role::scratch ? places.size() - 1 : end.buffer;
    expects(places.at(index) != 0, "a buffer at the destination for every region");
    return places[index];
  }

  void upload(const Tables& tables, const std::vector<Gate>& gates,
              const std::vector<Signal>& signals) {
    std::vector<const std::uint64_t*> marks;
    for (const auto& [peer, at] : control_of_) {
      marks.push_back(reinterpret_cast<const std::uint64_t*>(at + offsetof(ControlHead, abort)));
    }
    std::uint64_t bytes = 0;
    const auto room = [&](const auto& values) {
      const std::uint64_t at = bytes;
      bytes += (values.size() * sizeof values[0] + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
      return at;
    };
    const std::uint64_t tasks_at = room(tables.tasks);
    const std::uint64_t loops_at = room(tables.loops);
    const std::uint64_t gates_at = room(gates);
    const std::uint64_t signals_at = room(signals);
    const std::uint64_t marks_at = room(marks);
    tables_memory_ = DeviceMemory(bytes);
    std::byte* base = tables_memory_.data();
    const auto copy = [&](const auto& values, std::uint64_t at) {
      if (!values.empty()) {
        check(cudaMemcpy(base + at, values.data(), values.size() * sizeof values[0],
                         cudaMemcpyHostToDevice),
              "upload the tables");
      }
    };
    copy(tables.tasks, tasks_at);
    copy(tables.loops, loops_at);
    copy(gates, gates_at);
    copy(signals, signals_at);
    copy(marks, marks_at);
    device_tables_ = {reinterpret_cast<const Task*>(base + tasks_at),
                      reinterpret_cast<const Loop*>(base + loops_at)};
    device_gates_ = reinterpret_cast<const Gate*>(base + gates_at);
    device_signals_ = reinterpret_cast<const Signal*>(base + signals_at);
    abort_count_ = static_cast<std::uint32_t>(marks.size());
    abort_words_ =
        marks.empty() ? nullptr : reinterpret_cast<const std::uint64_t* const*>(base + marks_at);
    control_.head = reinterpret_cast<ControlHead*>(control_memory_->data());
    control_.flags =
        reinterpret_cast<volatile std::uint64_t*>(control_memory_->data() + sizeof(ControlHead));
    control_.host = words_.get();
    control_.stride = stride_;
    const std::uint64_t first_round = 1;
    check(
        cudaMemcpy(&control_.head->round, &first_round, sizeof first_round, cudaMemcpyHostToDevice),
        "set up the control block");
    figures_.device_bytes = control_bytes_ + bytes + staging_memory_.bytes() +
                            scratch_memory_->bytes() + mirror_memory_->bytes();
    figures_.table_bytes = bytes;
    if (figures_.engine_copies > 0) {
      engine_ = std::make_unique<Stream>();
    }
    if (uses_wire_) {
      pack_ = std::make_unique<Stream>();
      exchange_ = std::make_unique<Stream>();
      unpack_ = std::make_unique<Stream>();
      for (int slot = 0; slot < 2; ++slot) {
        packed_.push_back(std::make_unique<Event>());
        moved_.push_back(std::make_unique<Event>());
        unpacked_.push_back(std::make_unique<Event>());
      }
    }
  }

  void report_traffic(const Program& program) {
    std::map<std::size_t, PeerTraffic> peers;
    std::map<std::size_t, std::set<std::string>> paths;
    for (const Region& region : program.sends) {
      const auto to = static_cast<std::size_t>(region.to.rank);
      peers[to].sent_bytes += region.bytes;
      paths[to].insert(to_string(path_to_.at(to)));
    }
    for (const Region& region : program.receives) {
      const auto from = static_cast<std::size_t>(region.from.rank);
      peers[from].received_bytes += region.bytes;
      paths[from].insert(to_string(path_from_.at(from)));
    }
    for (auto& [peer, traffic] : peers) {
      traffic.peer = static_cast<Rank>(peer);
      for (const std::string& path : paths[peer]) {
        traffic.path += (traffic.path.empty() ? "" : "+") + path;
      }
      if (traffic.sent_bytes + traffic.received_bytes > 0) {
        report_.peers.push_back(traffic);
      }
    }
    for (const Region& region : program.copies) {
      report_.copied_bytes += region.bytes;
    }
  }

  // ---------------------------------------------------------------- queueing

  SignalSlice slice(const Range& range) const {
    return {device_signals_ + range.begin, static_cast<std::uint32_t>(range.count)};
  }

  static std::uint32_t opened_value(std::size_t stage) {
    return static_cast<std::uint32_t>(stage + 1);
  }

  /// Entry of the next kernel; the first one of a round carries the permissions to write here.
  Entry entry_for(const Range& gates, std::uint32_t opened) {
    const Entry entry{std::exchange(ready_due_, false) ? slice(ready_) : SignalSlice{},
                      device_gates_ + gates.begin, static_cast<std::uint32_t>(gates.count), opened};
    return entry;
  }

  /// Gate, list and wire of a stage.
  void queue_head(std::size_t s, bool captured) {
    const Stage& stage = stages_[s];
    if (stage.empty()) {
      return;
    }
    const bool called_back = !captured && !stage.engine.empty();
    Entry entry = entry_for(stage.gates, called_back ? opened_value(s) : 0);
    // Blocks that wait hold the device: only where no rank that they wait for needs it.
    const bool fused = alone_on_device_ && stage.list.count > 0 && stage.wire.empty() &&
                       (stage.engine.empty() || called_back);
    if (!fused) {
      if (entry.gate_count > 0 || entry.ready.count > 0 || called_back) {
        launch_gate(control_, entry, {}, main_);
      }
      entry = {};
    }
    if (!stage.engine.empty() || !stage.wire.empty()) {
      fork_.record(main_);
    }
    if (stage.list.count > 0) {
      const bool rest = !stage.engine.empty() || !stage.wire.empty();
      ended_ = !rest && s + 1 == stages_.size() && last_gates_.count == 0;
      launch_list(control_, device_tables_, stage.list, entry,
                  {stage.engine.empty() ? slice(stage.signals) : SignalSlice{}, ended_},
                  options().blocks, main_);
    }
    if (!stage.wire.empty()) {
      queue_wire(stage.wire);
    }
  }

  void queue_engine(std::size_t s, bool captured) {
    Stage& stage = stages_[s];
    if (stage.engine.empty()) {
      return;
    }
    if (captured) {
      fork_.hold(*engine_);  // otherwise the host has seen the gate open
    }
    copy_by_engine(stage.engine, captured);
    engine_done_.record(*engine_);
    engine_done_.hold(main_);
    ended_ = s + 1 == stages_.size() && last_gates_.count == 0;
    launch_gate(control_, {}, {slice(stage.signals), ended_}, main_);
  }

  /// After everything of the stage.
  void queue_permissions(std::size_t s) {
    const Stage& stage = stages_[s];
    if (stage.permissions.count > 0) {
      launch_gate(control_, {}, {slice(stage.permissions), false}, main_);
    }
  }

  void copy_by_engine(EngineBatch& batch, bool captured) {
    for (const EngineCopy& copy : batch.pitched) {
      check(cudaMemcpy2DAsync(reinterpret_cast<void*>(copy.destination), copy.destination_pitch,
                              reinterpret_cast<const void*>(copy.source), copy.source_pitch,
                              copy.row_bytes, copy.rows, cudaMemcpyDeviceToDevice, *engine_),
            "queue a pitched copy");
    }
#if CUDART_VERSION >= 13000
    if (!batch.wide.empty()) {
      check(cudaMemcpy3DBatchAsync(batch.wide.size(), batch.wide.data(), 0, *engine_),
            "queue a batch of pitched copies");
    }
#endif
    if (batch.targets.empty()) {
      return;
    }
#if CUDART_VERSION >= 13000
    if (!captured && batch.targets.size() >= kSmallestBatch) {  // a batch cannot be captured
      cudaMemcpyAttributes attributes{};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
      std::size_t first = 0;
      check(cudaMemcpyBatchAsync(batch.targets.data(), batch.sources.data(), batch.sizes.data(),
                                 batch.targets.size(), &attributes, &first, 1, *engine_),
            "queue a batch of copies");
      return;
    }
#endif
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      check(cudaMemcpyAsync(batch.targets[i], batch.sources[i], batch.sizes[i],
                            cudaMemcpyDeviceToDevice, *engine_),
            "queue a copy");
    }
  }

  void queue_wire(const std::vector<WireStep>& steps) {
    for (const Stream* stream : {pack_.get(), exchange_.get(), unpack_.get()}) {
      fork_.hold(*stream);
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const WireStep& step = steps[i];
      const std::size_t slot = i % 2;
      if (i >= 2) {
        moved_[slot]->hold(*pack_);         // the slot's last chunk has left
        unpacked_[slot]->hold(*exchange_);  // and its last arrival was read
      }
      if (step.pack.count > 0) {
        launch_list(control_, device_tables_, step.pack, {}, {}, options().blocks, *pack_);
      }
      packed_[slot]->record(*pack_);
      packed_[slot]->hold(*exchange_);
      connection_->comm->exchange(step.sends, step.receives, *exchange_, deadline_);
      moved_[slot]->record(*exchange_);
      moved_[slot]->hold(*unpack_);
      if (step.unpack.count > 0) {
        launch_list(control_, device_tables_, step.unpack, {}, {}, options().blocks, *unpack_);
      }
      unpacked_[slot]->record(*unpack_);
    }
    wire_done_.record(*unpack_);
    wire_done_.hold(main_);
    wire_sent_.record(*exchange_);
    wire_sent_.hold(main_);
  }

  void queue_last() {
    if (!ended_) {
      launch_gate(control_, entry_for(last_gates_, 0), {{}, true}, main_);
    }
    check(cudaGetLastError(), "queue a round");
  }

  /// Host memory to its mirrors before a round; destinations back after it.
  void copy_mirrors(bool back) {
    for (const Mirror& m : mirrors_) {
      if (back && m.destination) {
        check(cudaMemcpyAsync(m.host, m.device, m.bytes, cudaMemcpyDeviceToHost, main_),
              "copy a buffer to the host");
      } else if (!back) {
        check(cudaMemcpyAsync(m.device, m.host, m.bytes, cudaMemcpyHostToDevice, main_),
              "copy a buffer to the device");
      }
    }
  }

  /// Queues what can be queued without waiting for a gate.
  void pump() {
    const auto begin = Clock::now();
    bool queued = false;
    while (next_stage_ < stages_.size()) {
      if (!head_queued_) {
        queue_head(next_stage_, false);
        head_queued_ = true;
        queued = true;
      }
      if (!stages_[next_stage_].engine.empty()) {
        if (PinnedWords::read(words_.get()->opened) <
            round_ * stride_ + opened_value(next_stage_)) {
          break;
        }
        queue_engine(next_stage_, false);
        queued = true;
      }
      queue_permissions(next_stage_);
      head_queued_ = false;
      ++next_stage_;
    }
    if (next_stage_ == stages_.size()) {
      queue_last();
      ++next_stage_;
      queued = true;
    }
    if (queued) {
      figures_.host_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    }
  }

  void capture() {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(main_, cudaStreamCaptureModeThreadLocal), "capture a round");
    ready_due_ = true;
    ended_ = false;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      queue_head(s, true);
      queue_engine(s, true);
      queue_permissions(s);
    }
    queue_last();
    check(cudaStreamEndCapture(main_, &graph), "capture a round");
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(made, "make a graph of a round");
  }

  // ---------------------------------------------------------------- watching and failing

  /// Looks for errors that no flag tells: of the library, of the streams, of peers that gave up.
  void poll() {
    if (uses_wire_) {
      try {
        connection_->comm->poll();
      } catch (const TransportError& error) {
        fail(error.code(), std::string(error.what()).substr(sizeof "nccl: " - 1), true);
      }
    }
    const cudaError_t state = cudaStreamQuery(main_);
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      check(state, "run a round");
    }
    check(cudaMemcpyAsync(&peer_abort_, &control_.head->abort, sizeof peer_abort_,
                          cudaMemcpyDeviceToHost, side_),
          "look for peers that gave up");
    if (cudaStreamSynchronize(side_) == cudaSuccess && peer_abort_ != 0) {
      fail(Errc::peer_lost, "a rank gave up in round " + std::to_string(round_), true);
    }
  }

  [[noreturn]] void fail(Errc code, std::string text, bool name_ranks) {
    const bool late = code == Errc::timed_out;
    std::string missing = name_ranks ? missing_ranks() : "";
    abort();
    if (uses_wire_ && connection_->comm) {
      connection_->comm->abort();
      if (missing.empty()) {
        for (const auto& traffic : report_.peers) {
          missing += (missing.empty() ? "" : ", ") + std::to_string(traffic.peer);
        }
        missing = "unknown, any of " + missing;
      }
    }
    drain();
    throw TransportError(code, "nccl: " + text +
                                   (late ? "; ranks missing: " : "; ranks not done: ") +
                                   (missing.empty() ? "none known" : missing));
  }

  /// Ranks whose flags are behind.
  std::string missing_ranks() {
    std::vector<std::uint64_t> flags(2 * world_);
    if (cudaMemcpyAsync(flags.data(), const_cast<const std::uint64_t*>(control_.flags),
                        flags.size() * sizeof flags[0], cudaMemcpyDeviceToHost,
                        side_) != cudaSuccess ||
        cudaStreamSynchronize(side_) != cudaSuccess) {
      return "";
    }
    std::set<std::size_t> behind;
    for (const Gate& gate : gate_table_) {
      if (flags[gate.flag] < round_ * stride_ + gate.add) {
        behind.insert(gate.flag % world_);
      }
    }
    std::string text;
    for (const std::size_t rank : behind) {
      text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
  }

  /// True when this rank's own work has ended.
  bool drain() noexcept {
    const auto until = Clock::now() + kDrainPatience;
    const Stream* const streams[] = {&main_,      &side_,          engine_.get(),
                                     pack_.get(), exchange_.get(), unpack_.get()};
    for (const Stream* stream : streams) {
      while (stream != nullptr && cudaStreamQuery(*stream) == cudaErrorNotReady) {
        if (Clock::now() > until) {
          return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    cudaGetLastError();
    return true;
  }

  std::shared_ptr<Connection> connection_;
  std::size_t rank_;
  std::size_t world_;

  // Addresses of this rank's buffers, and memory of the session.
  std::vector<std::uint64_t> source_;
  std::vector<std::uint64_t> destination_;
  std::uint64_t scratch_ = 0;
  std::vector<Mirror> mirrors_;
  std::shared_ptr<DeviceMemory> mirror_memory_;
  std::shared_ptr<DeviceMemory> scratch_memory_;
  std::shared_ptr<DeviceMemory> control_memory_;
  std::uint64_t control_bytes_ = 0;
  DeviceMemory tables_memory_;
  DeviceMemory staging_memory_;
  PinnedWords words_;

  // Peers, by rank.
  std::map<std::size_t, Path> path_to_;
  std::map<std::size_t, Path> path_from_;
  std::map<std::size_t, std::uint64_t> control_of_;
  std::map<std::size_t, std::vector<std::uint64_t>> places_of_;
  std::vector<std::shared_ptr<void>> kept_;
  std::uint64_t window_base_ = 0;
  std::unique_ptr<Window> window_;
  bool uses_wire_ = false;
  bool alone_on_device_ = false;
  bool replays_ = false;

  // The compiled round.
  WireLimits limits_;
  std::vector<Stage> stages_;
  Range ready_;
  Range last_gates_;
  std::vector<Gate> gate_table_;
  std::uint64_t stride_ = 1;
  Control control_;
  DeviceTables device_tables_;
  const Gate* device_gates_ = nullptr;
  const Signal* device_signals_ = nullptr;
  const std::uint64_t* const* abort_words_ = nullptr;
  std::uint32_t abort_count_ = 0;

  // Streams and what orders them.
  // Those of the engines and the wire exist where they are used: the driver shares few hardware
  // queues among streams, and a stream that waits holds up those behind it in its queue.
  Stream main_;
  Stream side_;
  std::unique_ptr<Stream> engine_;
  std::unique_ptr<Stream> pack_;
  std::unique_ptr<Stream> exchange_;
  std::unique_ptr<Stream> unpack_;
  Event caller_;
  Event fork_;
  Event engine_done_;
  Event wire_done_;
  Event wire_sent_;
  std::vector<std::unique_ptr<Event>> packed_;
  std::vector<std::unique_ptr<Event>> moved_;
  std::vector<std::unique_ptr<Event>> unpacked_;
  cudaGraphExec_t graph_ = nullptr;

  // The round in progress.
  std::uint64_t round_ = 0;
  std::size_t next_stage_ = 0;
  bool head_queued_ = false;
  bool ready_due_ = false;  // no kernel of the round has carried the permissions yet
  bool ended_ = false;      // a kernel that is queued ends the round
  bool running_ = false;
  Deadline deadline_;
  Clock::time_point started_;
  std::uint64_t peer_abort_ = 0;
  RoundReport report_;
  SessionFigures figures_;
};

}  // namespace

SessionFigures figures_of(const Session& session) {
  const auto* own = dynamic_cast<const NcclSession*>(&session);
  expects(own != nullptr, "a session of transport 'nccl'");
  return own->figures();
}

std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline) {
  const DeviceGuard guard(connection->device);
  return std::make_unique<NcclSession>(std::move(connection), program, buffers, deadline);
}

}  // namespace m2n::nccl
