// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The NCCL transport from one trainer to one worker on two GPUs, as ratios to the copy-engine rate
/// of the same run. Bytes are compared before anything is timed; a time is that of the slower rank,
/// the median of ten rounds after two.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "core/tensor/cast.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/session.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

constexpr int kWarmUps = 2;
constexpr int kRounds = 10;

struct Tensor {
  std::string name;
  Shape shape;
  Shape lo;  ///< The part that the worker wants ...
  Shape hi;  ///< ... which is all of it when empty.
};

struct Workload {
  std::string name;
  std::vector<Tensor> tensors;
  std::vector<std::size_t> worker_order;  ///< Of the worker's arena; empty: as the trainer's.
  DType source = DType::bf16;
  DType destination = DType::bf16;
  Options options;
  double wanted = 0;          ///< At least this ratio; 0: any.
  double wanted_host_us = 0;  ///< At most; 0: any.
};

void add(std::vector<Tensor>& out, std::string name, Shape shape) {
  out.push_back({std::move(name), shape, {}, {}});
}

/// Qwen3 dense: 8B has 36 layers of 4096, 32B 64 of 5120.
std::vector<Tensor> qwen3_dense(Index layers, Index hidden, Index heads, Index inner) {
  constexpr Index kVocabulary = 151'936;
  constexpr Index kHeadDim = 128;
  constexpr Index kKvHeads = 8;
  std::vector<Tensor> out;
  add(out, "embed", {kVocabulary, hidden});
  for (Index l = 0; l < layers; ++l) {
    const std::string p = std::to_string(l) + ".";
    add(out, p + "q", {heads * kHeadDim, hidden});
    add(out, p + "k", {kKvHeads * kHeadDim, hidden});
    add(out, p + "v", {kKvHeads * kHeadDim, hidden});
    add(out, p + "o", {hidden, heads * kHeadDim});
    add(out, p + "q_norm", {kHeadDim});
    add(out, p + "k_norm", {kHeadDim});
    add(out, p + "gate", {inner, hidden});
    add(out, p + "up", {inner, hidden});
    add(out, p + "down", {hidden, inner});
    add(out, p + "norm1", {hidden});
    add(out, p + "norm2", {hidden});
  }
  add(out, "norm", {hidden});
  add(out, "head", {kVocabulary, hidden});
  return out;
}

/// Qwen3-30B-A3B, every expert a tensor of its own. @p stacked  The worker's order: gate and up of
/// all experts of a layer one after the other, then down of all.
std::vector<Tensor> qwen3_moe(std::vector<std::size_t>& stacked) {
  constexpr Index kHidden = 2048;
  constexpr Index kInner = 768;
  constexpr Index kExperts = 128;
  std::vector<Tensor> out;
  std::vector<std::size_t> downs;
  add(out, "embed", {151'936, kHidden});
  stacked.push_back(0);
  const auto plain = [&](const std::string& name, Shape shape) {
    stacked.push_back(out.size());
    add(out, name, shape);
  };
  for (Index l = 0; l < 48; ++l) {
    const std::string p = std::to_string(l) + ".";
    plain(p + "q", {4096, kHidden});
    plain(p + "k", {512, kHidden});
    plain(p + "v", {512, kHidden});
    plain(p + "o", {kHidden, 4096});
    plain(p + "q_norm", {128});
    plain(p + "k_norm", {128});
    plain(p + "norm1", {kHidden});
    plain(p + "norm2", {kHidden});
    plain(p + "router", {kExperts, kHidden});
    downs.clear();
    for (Index e = 0; e < kExperts; ++e) {
      const std::string x = p + std::to_string(e) + ".";
      plain(x + "gate", {kInner, kHidden});
      plain(x + "up", {kInner, kHidden});
      downs.push_back(out.size());
      add(out, x + "down", {kHidden, kInner});
    }
    stacked.insert(stacked.end(), downs.begin(), downs.end());
  }
  plain("norm", {kHidden});
  plain("head", {151'936, kHidden});
  return out;
}

std::vector<Tensor> equal_tensors(int count, Index bytes) {
  std::vector<Tensor> out;
  for (int i = 0; i < count; ++i) {
    add(out, "t" + std::to_string(i), {bytes / 2});
  }
  return out;
}

/// The worker's quarter of the columns of larger tensors.
std::vector<Tensor> column_slices(Index row_bytes) {
  std::vector<Tensor> out;
  const Index columns = row_bytes / 2;
  const Index rows = (Index{64} << 20) / row_bytes;
  for (int i = 0; i < 32; ++i) {
    out.push_back(
        {"t" + std::to_string(i), {rows, 4 * columns}, {0, columns}, {rows, 2 * columns}});
  }
  return out;
}

std::vector<std::size_t> shuffled(std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 random(5);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// All ranks leave together, within a microsecond.
class SpinBarrier {
 public:
  void arrive_and_wait() {
    const unsigned round = round_.load();
    if (arrived_.fetch_add(1) == 1) {
      arrived_ = 0;
      ++round_;
      return;
    }
    while (round_.load() == round) {
    }
  }

 private:
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

Box box_of(const Tensor& t) { return t.lo.empty() ? Box::whole(t.shape) : Box{t.lo, t.hi}; }

Shape extents_of(const Box& box) {
  Shape out;
  for (std::size_t d = 0; d < box.lo.size(); ++d) {
    out.push_back(box.hi[d] - box.lo[d]);
  }
  return out;
}

Problem make_problem(const Workload& w) {
  LayoutTable layouts;
  std::vector<Parameter> parameters;
  for (const Tensor& t : w.tensors) {
    const Box box = box_of(t);
    parameters.push_back(
        {t.name,
         t.shape,
         {layouts.intern(Layout::explicit_pieces(
              t.shape, w.source, {0}, {{0, {Box::whole(t.shape), {0, 0, row_major(t.shape)}}}})),
          {t.name}},
         {layouts.intern(Layout::explicit_pieces(t.shape, w.destination, {1},
                                                 {{1, {box, {0, 0, row_major(extents_of(box))}}}})),
          {t.name}},
         w.source != w.destination});
  }
  return Problem::make(std::move(parameters));
}

struct Result {
  double seconds = 0;
  std::uint64_t bytes = 0;
  std::string path;
  SessionFigures sender;
  double worst_host_seconds = 0;
  bool verified = false;
  double prepare_seconds = 0;
};

Result run(const Workload& w) {
  const Problem problem = make_problem(w);
  const Registries registries = builtin_registries();
  const Plan plan =
      registries.planners.create("direct", {})->plan(problem, Topology::single_island(2));
  const auto source_bytes = problem.buffer_bytes(Role::source, 0);
  const auto worker_bytes = problem.buffer_bytes(Role::destination, 1);
  const auto total = [](const std::vector<std::uint64_t>& sizes) {
    std::uint64_t sum = 0;
    for (const std::uint64_t size : sizes) {
      sum += (size + 15) / 16 * 16;
    }
    return std::max<std::uint64_t>(sum, 1 << 20);
  };
  DeviceArena source(0, total(source_bytes));
  DeviceArena worker(1, total(worker_bytes));
  Buffers buffers[2];
  for (Buffers& b : buffers) {
    b.source.resize(source_bytes.size());
    b.destination.resize(worker_bytes.size());
  }
  std::vector<std::size_t> order = w.worker_order;
  if (order.empty()) {
    order.resize(worker_bytes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
  }
  for (std::size_t i = 0; i < source_bytes.size(); ++i) {
    buffers[0].source[i] = source.take(source_bytes[i]);
  }
  for (const std::size_t i : order) {
    buffers[1].destination[i] = worker.take(worker_bytes[i]);
  }
  {
    const DeviceGuard guard(0);
    for (std::size_t i = 0; i < w.tensors.size(); ++i) {
      const Tensor& t = w.tensors[i];
      device_fill_synthetic(t.shape, Box::whole(t.shape), w.source, synthetic_seed(t.name),
                            buffers[0].source[i].data, row_major(t.shape));
    }
  }
  {
    const DeviceGuard guard(1);
    check(cudaMemset(worker.data(), 0xEE, worker.bytes()), "poison");
    check(cudaDeviceSynchronize(), "poison");
  }

  Result result;
  auto groups = make_thread_groups(2);
  SpinBarrier together;
  std::vector<std::vector<double>> seconds(2);
  std::vector<std::vector<double>> host(2);
  std::string failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      try {
        const auto deadline = [] { return deadline_in(std::chrono::seconds(60)); };
        cudaSetDevice(rank);
        const auto transport = registries.transports.create("nccl", {w.options});
        transport->connect(*groups[r], deadline());
        const auto begin = std::chrono::steady_clock::now();
        const auto session =
            transport->prepare(make_program(plan, problem, rank), buffers[rank], deadline());
        if (rank == 0) {
          result.prepare_seconds =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        session->start(1, deadline());
        session->wait(deadline());
        groups[r]->barrier("moved", deadline());
        if (rank == 1) {
          result.verified = true;
          for (std::size_t i = 0; i < w.tensors.size(); ++i) {
            const Tensor& t = w.tensors[i];
            const Box box = box_of(t);
            const std::uint64_t got =
                device_digest_of_box(t.shape, box, w.destination, buffers[1].destination[i].data,
                                     row_major(extents_of(box)));
            std::uint64_t expected = 0;
            if (w.source == w.destination) {
              const DeviceGuard guard(0);
              Index first = 0;
              for (std::size_t d = 0; d < t.shape.size(); ++d) {
                first += box.lo[d] * row_major(t.shape)[d];
              }
              expected = device_digest_of_box(
                  t.shape, box, w.source,
                  buffers[0].source[i].data + first * static_cast<Index>(bytes_of(w.source)),
                  row_major(t.shape));
            } else {  // the host's cast of the values that the trainer holds
              const auto count = static_cast<std::uint64_t>(element_count(t.shape));
              std::vector<std::byte> values(count * bytes_of(w.source));
              std::vector<std::byte> cast(count * bytes_of(w.destination));
              check(cudaMemcpy(values.data(), buffers[0].source[i].data, values.size(),
                               cudaMemcpyDeviceToHost),
                    "read the source");
              cast_elements(w.source, values.data(), w.destination, cast.data(), count);
              expected =
                  digest_of_box(t.shape, box, w.destination, cast.data(), row_major(t.shape));
            }
            if (got != expected) {
              result.verified = false;
              std::printf("  %s: tensor %s differs\n", w.name.c_str(), t.name.c_str());
              break;
            }
          }
        }
        groups[r]->barrier("verified", deadline());
        for (int round = 0; round < kWarmUps + kRounds; ++round) {
          together.arrive_and_wait();
          session->start(static_cast<std::uint64_t>(round) + 2, deadline());
          const RoundReport report = session->wait(deadline());
          seconds[r].push_back(report.seconds);
          host[r].push_back(figures_of(*session).host_seconds);
          if (rank == 0 && !report.peers.empty()) {
            result.path = report.peers[0].path;
            result.bytes = report.peers[0].sent_bytes;
          }
        }
        groups[r]->barrier("timed", deadline());
        if (rank == 0) {
          result.sender = figures_of(*session);
        }
      } catch (const std::exception& error) {
        failure = error.what();
        std::fprintf(stderr, "  %s: rank %d: %s\n", w.name.c_str(), rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::vector<double> slower;
  std::vector<double> hosts;
  for (std::size_t i = kWarmUps; i < seconds[0].size(); ++i) {
    slower.push_back(std::max(seconds[0][i], seconds[1][i]));
    hosts.push_back(std::max(host[0][i], host[1][i]));
  }
  result.seconds = median(slower);
  result.worst_host_seconds = median(hosts);
  return result;
}

/// Bytes a second of a copy engine, 4 GiB at a time.
double engine_rate() {
  constexpr std::uint64_t kBytes = 4ULL << 30;
  DeviceArena from(0, kBytes);
  DeviceArena to(1, kBytes);
  const DeviceGuard guard(0);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  Stream stream;
  std::vector<double> seconds;
  for (int i = 0; i < kWarmUps + kRounds; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
          "copy");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "wait");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= kWarmUps) {
      seconds.push_back(ms * 1e-3);
    }
  }
  return static_cast<double>(kBytes) / median(seconds);
}

/// What a figure of the table ought to be, and whether it was.
class Goals {
 public:
  /// "met" or "MISSED".
  const char* note(const std::string& what, bool met) {
    (met ? met_ : missed_).push_back(what);
    return met ? "met" : "MISSED";
  }
  void print() const {
    std::printf("%zu figures met, %zu missed%s\n", met_.size(), missed_.size(),
                missed_.empty() ? "" : ":");
    for (const std::string& what : missed_) {
      std::printf("  %s\n", what.c_str());
    }
  }

 private:
  std::vector<std::string> met_;
  std::vector<std::string> missed_;
};

void print(const Workload& w, const Result& r, double engine, Goals& goals) {
  const double rate = static_cast<double>(r.bytes) / r.seconds;
  const double host_us = r.worst_host_seconds * 1e6;
  constexpr std::uint64_t kMostExtra = 1 << 20;  // beside the tables, where nothing is staged
  if (r.path != "wire") {
    goals.note(w.name + ": extra device memory under 1 MiB and descriptors",
               r.sender.device_bytes - r.sender.table_bytes < kMostExtra);
  }
  std::printf(
      "%-44s %6zu %8.2f GB %10.3f ms %6.1f GB/s %6.3f %-6s %-6s host %8.1f us %-6s extra %9.1f KiB "
      "(tables %9.1f)  %6llu engine %6llu list  prepare %.2f s  bytes %s\n",
      w.name.c_str(), w.tensors.size(), static_cast<double>(r.bytes) * 1e-9, r.seconds * 1e3,
      rate * 1e-9, rate / engine,
      w.wanted == 0 ? "" : goals.note(w.name + ": rate", rate / engine >= w.wanted), r.path.c_str(),
      host_us,
      w.wanted_host_us == 0 ? "" : goals.note(w.name + ": host time", host_us < w.wanted_host_us),
      static_cast<double>(r.sender.device_bytes) / 1024,
      static_cast<double>(r.sender.table_bytes) / 1024,
      static_cast<unsigned long long>(r.sender.engine_copies),
      static_cast<unsigned long long>(r.sender.list_tasks), r.prepare_seconds,
      r.verified ? "equal" : "DIFFER");
  std::fflush(stdout);
}

std::vector<Workload> workloads() {
  std::vector<Workload> out;
  using Order = std::vector<std::size_t>;
  const auto row = [&](const std::string& name, const std::vector<Tensor>& tensors,
                       const Order& order, double wanted,
                       const Options& options = {}) -> Workload& {
    out.push_back({name, tensors, order, DType::bf16, DType::bf16, options, wanted, 0});
    return out.back();
  };
  const auto any = [](const std::vector<Tensor>& tensors) { return shuffled(tensors.size()); };
  const Options graph = {{"graph", "on"}};
  const Options wire = {{"path", "wire"}};
  const Options list = {{"engine_max_copies", "0"}};

  const auto dense8 = qwen3_dense(36, 4096, 32, 12'288);
  row("qwen3-8b", dense8, any(dense8), .98);
  row("qwen3-8b, arenas in one order", dense8, {}, .98);
  row("qwen3-8b, graph", dense8, any(dense8), 0, graph);
  row("qwen3-8b, wire", dense8, any(dense8), .88, wire);
  const auto dense32 = qwen3_dense(64, 5120, 64, 25'600);
  row("qwen3-32b", dense32, any(dense32), .99);
  Order stacked;
  const auto moe = qwen3_moe(stacked);
  row("qwen3-30b-a3b, worker stacks experts", moe, stacked, .97);
  row("qwen3-30b-a3b, any order", moe, any(moe), .97);
  row("qwen3-30b-a3b, any order, host time is dear", moe, any(moe), 0, {{"engine_host_us", "500"}})
      .wanted_host_us = 100;
  row("qwen3-30b-a3b, worker stacks experts, graph", moe, stacked, 0, graph);
  row("qwen3-30b-a3b, any order, graph", moe, any(moe), 0, graph);
  row("qwen3-30b-a3b, arenas in one order", moe, {}, .97).wanted_host_us = 100;
  const auto mib = equal_tensors(1000, 1 << 20);
  row("1000 x 1 MiB", mib, any(mib), .93);
  row("1000 x 1 MiB, list kernel alone", mib, any(mib), 0, list);
  row("1000 x 1 MiB, graph", mib, any(mib), 0, graph);
  const auto kib = equal_tensors(2000, 64 << 10);
  row("2000 x 64 KiB", kib, any(kib), .88);
  row("2000 x 64 KiB, graph", kib, any(kib), .88, graph);
  const auto tiny = equal_tensors(10'000, 4 << 10);
  row("10000 x 4 KiB", tiny, any(tiny), 0);
  for (const Index bytes : {Index{512}, Index{2048}, Index{16'384}}) {
    const auto slices = column_slices(bytes);
    const std::string name = "columns, rows of " + std::to_string(bytes) + " B";
    row(name, slices, any(slices), .85);
    row(name + ", list kernel alone", slices, any(slices), 0, list);
  }
  const auto casts = equal_tensors(64, 64 << 20);
  row("cast: f32 to bf16 in the move", casts, any(casts), 0).source = DType::f32;
  row("cast: f32 moved as it is", casts, any(casts), 0).source = DType::f32;
  out.back().destination = DType::f32;
  return out;
}

/// Seconds of the best cast kernel that we have, on one GPU: f32 to bf16, 64 tensors of 32 Mi
/// elements.
double local_cast_seconds() {
  constexpr Index kElements = (64 << 20) / 2;
  constexpr std::size_t kTensors = 64;
  const auto f32 = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::f32, Mesh({1}, 0), {Placement::replicate()}));
  const auto bf16 = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::bf16, Mesh({1}, 0), {Placement::replicate()}));
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const std::string name = "t" + std::to_string(i);
    parameters.push_back({name, {kElements}, {f32, {name}}, {bf16, {name}}, true});
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Registries registries = builtin_registries();
  const Plan plan =
      registries.planners.create("direct", {})->plan(problem, Topology::single_island(1));
  DeviceArena source(0, kTensors * kElements * 4);
  DeviceArena destination(0, kTensors * kElements * 2);
  Buffers buffers;
  for (std::size_t i = 0; i < kTensors; ++i) {
    buffers.source.push_back(source.take(kElements * 4));
    buffers.destination.push_back(destination.take(kElements * 2));
  }
  auto groups = make_thread_groups(1);
  const auto deadline = [] { return deadline_in(std::chrono::seconds(60)); };
  const auto transport = registries.transports.create("nccl", {});
  transport->connect(*groups[0], deadline());
  const auto session = transport->prepare(make_program(plan, problem, 0), buffers, deadline());
  std::vector<double> seconds;
  for (int round = 0; round < kWarmUps + kRounds; ++round) {
    session->start(static_cast<std::uint64_t>(round) + 1, deadline());
    seconds.push_back(session->wait(deadline()).seconds);
  }
  return median({seconds.begin() + kWarmUps, seconds.end()});
}

}  // namespace

int run_all(const std::vector<std::string>& only) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
    std::printf("skipped: this benchmark needs two GPUs that map each other, found %d\n", devices);
    return 77;
  }
  {
    const DeviceGuard guard(0);
    cudaDeviceEnablePeerAccess(1, 0);
    cudaGetLastError();
  }
  std::printf("NCCL %d\n", library_version());
  const double engine = engine_rate();
  std::printf("copy engine, 4 GiB: %.1f GB/s\n", engine * 1e-9);
  bool bad = false;
  Goals goals;
  double cast_in_move = 0;
  double moved = 0;
  for (const Workload& w : workloads()) {
    const bool wanted = only.empty() || std::any_of(only.begin(), only.end(), [&](const auto& o) {
                          return w.name.find(o) != std::string::npos;
                        });
    if (!wanted) {
      continue;
    }
    const Result r = run(w);
    print(w, r, engine, goals);
    bad = bad || !r.verified;
    if (w.name.find("in the move") != std::string::npos) {
      cast_in_move = r.seconds;
    }
    if (w.name.find("as it is") != std::string::npos) {
      moved = r.seconds;
    }
  }
  if (cast_in_move > 0 && moved > 0) {
    constexpr double kWantedGain = 1.6;
    const double local = local_cast_seconds();
    const double gain = (moved + local) / cast_in_move;
    std::printf(
        "cast in the move %.3f ms; moved %.3f ms and cast after %.3f ms: %.2f times as fast %s\n",
        cast_in_move * 1e3, moved * 1e3, local * 1e3, gain,
        goals.note("cast in the move", gain >= kWantedGain));
  }
  std::printf("copy engine again: %.1f GB/s\n", engine_rate() * 1e-9);
  goals.print();
  return bad ? 1 : 0;
}

}  // namespace m2n::nccl

int main(int argc, char** argv) {
  try {
    return m2n::nccl::run_all({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
}
