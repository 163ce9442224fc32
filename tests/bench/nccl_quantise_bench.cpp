// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Weights that are trained in bf16 and served as f8_e4m3 with block scales, on two GPUs: quantised
/// in the move, against moved as they are and quantised afterwards. Both leave the same bytes,
/// which is checked. A time is that of the slower rank, the median of ten rounds after two.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/api/memory.hpp"
#include "core/api/scales.hpp"
#include "core/engine/world_buffers.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "core/tensor/block_scales.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUps = 2;
constexpr int kRounds = 10;
constexpr Rank kRanks = 2;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Deadline soon() { return deadline_in(std::chrono::seconds(60)); }

struct Shapes {
  std::string name;
  std::size_t count;
  Shape shape;
  Dims blocks;
};

std::shared_ptr<const Layout> on(Rank rank, const Shape& shape, DType dtype) {
  return std::make_shared<const Layout>(
      Layout::sharded(shape, dtype, Mesh({1}, rank), {Placement::replicate()}));
}

/// Weights from @p from to @p to; of @p quantised with their scales, otherwise as they are.
Problem problem_of(const Shapes& shapes, Rank from, Rank to, bool quantised) {
  const Shape grid = scale_shape(shapes.shape, shapes.blocks);
  const auto source = on(from, shapes.shape, DType::bf16);
  const auto destination = on(to, shapes.shape, quantised ? DType::f8_e4m3 : DType::bf16);
  const auto scales_from = on(from, grid, DType::f32);
  const auto scales_to = on(to, grid, DType::f32);
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < shapes.count; ++i) {
    const std::string name = "w" + std::to_string(i);
    const std::string scales = name + "_scale_inv";
    parameters.push_back({name, shapes.shape, {source, {name}}, {destination, {name}}, false, {}});
    if (quantised) {
      parameters.back().quantise = Quantise{shapes.blocks, scales};
      parameters.push_back(
          {scales, grid, {scales_from, {scales}}, {scales_to, {scales}}, false, {}});
    }
  }
  return Problem::make(std::move(parameters));
}

/// What the buffers' oracle would ask for; nobody does here.
class NoValues final : public TensorValues {
 public:
  std::string_view name() const noexcept override { return "none"; }
  const Catalogue& catalogue() const override { return catalogue_; }
  void read(std::string_view, const Box&, std::byte*, const Strides&) const override {}

 private:
  Catalogue catalogue_;
};

struct Times {
  double scales = 0;
  double move = 0;
  double all = 0;  ///< Both, one after the other.
};

/// Rounds of @p problem, of which the first part is its scales. One rank alone lives on GPU 1.
Times run(const Problem& problem, const std::vector<Buffers>& buffers) {
  const auto world = static_cast<Rank>(buffers.size());
  const Registries registries = builtin_registries();
  const Plan plan =
      registries.planners.create("direct", {})->plan(problem, Topology::single_island(world));
  auto groups = make_thread_groups(world);
  std::vector<std::vector<Times>> times(buffers.size());
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      try {
        const int device = world == 1 ? 1 : rank;
        check(cudaSetDevice(device), "select the device");
        const auto transport = registries.transports.create("nccl", {{}, {}, device});
        transport->connect(*groups[r], soon());
        Program program = make_program(plan, problem, rank);
        program.world_size = world;
        const auto session = transport->prepare(program, buffers[r], soon());
        for (int round = 0; round < kWarmUps + kRounds; ++round) {
          groups[r]->barrier("begin", soon());
          const auto start = Clock::now();
          if (std::binary_search(problem.source_ranks().begin(), problem.source_ranks().end(),
                                 rank)) {
            compute_scales(problem, rank, buffers[r].source);
          }
          const double scales = seconds_since(start);
          session->start(static_cast<std::uint64_t>(round) + 1, soon());
          session->wait(soon());
          const double all = seconds_since(start);
          times[r].push_back({scales, all - scales, all});
        }
        groups[r]->barrier("end", soon());
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto slower = [&](double Times::*part) {
    std::vector<double> all;
    for (std::size_t round = kWarmUps; round < times[0].size(); ++round) {
      double most = 0;
      for (const auto& of_rank : times) {
        most = std::max(most, of_rank[round].*part);
      }
      all.push_back(most);
    }
    return median(all);
  };
  return {slower(&Times::scales), slower(&Times::move), slower(&Times::all)};
}

std::uint64_t digest_of(const std::vector<LocalBuffer>& buffers) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes > 0) {
      const Shape shape{static_cast<Index>(buffers[i].bytes)};
      sum += (i + 1) *
             memory_of(buffers[i])
                 .digest_of_box(shape, Box::whole(shape), DType::u8, buffers[i], row_major(shape));
    }
  }
  return sum;
}

/// @return whether both ways left the same bytes.
bool compare(const Shapes& shapes) {
  const NoValues values;
  const Problem in_move = problem_of(shapes, 0, 1, true);
  const Problem as_it_is = problem_of(shapes, 0, 1, false);
  WorldBuffers one(in_move, values, MemorySpace::device, BufferOrder::declared);
  WorldBuffers two(as_it_is, values, MemorySpace::device, BufferOrder::declared);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    one.fill(rank);
    two.fill(rank);
  }
  const Times quantised = run(in_move, {one.of(0), one.of(1)});
  const Times moved = run(as_it_is, {two.of(0), two.of(1)});

  // Afterwards, on the worker's own device: from what has arrived there.
  const Problem local = problem_of(shapes, 0, 0, true);
  const std::unique_ptr<Arena> arena =
      memory_of(MemorySpace::device)
          .reserve(
              [&] {
                std::uint64_t bytes = 0;
                for (const Role role : {Role::source, Role::destination}) {
                  for (const std::uint64_t buffer : local.buffer_bytes(role, 0)) {
                    bytes += buffer + 256;
                  }
                }
                return bytes;
              }(),
              1);
  Buffers afterwards;
  const BufferTable& table = local.buffers(Role::source);
  const std::vector<std::uint64_t> source_bytes = local.buffer_bytes(Role::source, 0);
  std::size_t weight = 0;
  for (std::size_t i = 0; i < table.names.size(); ++i) {
    const bool scales = table.names[i].ends_with("_scale_inv");
    afterwards.source.push_back(scales ? arena->take(source_bytes[i], 256)
                                       : two.of(1).destination[weight++]);
  }
  for (const std::uint64_t bytes : local.buffer_bytes(Role::destination, 0)) {
    afterwards.destination.push_back(arena->take(bytes, 256));
  }
  const Times after = run(local, {afterwards});

  const double gigabytes =
      static_cast<double>(shapes.count) * static_cast<double>(element_count(shapes.shape)) * 1e-9;
  const bool equal = digest_of(one.of(1).destination) == digest_of(afterwards.destination);
  std::printf(
      "%s: %.2f G elements\n"
      "  in the move:  scales %8.3f ms (%6.1f GB/s read), move %8.3f ms (%6.1f GB/s of f8), both "
      "%8.3f ms\n"
      "  afterwards:   move %8.3f ms (%6.1f GB/s of bf16), scales %8.3f ms, quantise %8.3f ms, all "
      "%8.3f ms\n"
      "  in the move is %.2f times as fast; bytes %s\n",
      shapes.name.c_str(), gigabytes, quantised.scales * 1e3, 2 * gigabytes / quantised.scales,
      quantised.move * 1e3, gigabytes / quantised.move, quantised.all * 1e3, moved.move * 1e3,
      2 * gigabytes / moved.move, after.scales * 1e3, after.move * 1e3,
      (moved.move + after.all) * 1e3, (moved.move + after.all) / quantised.all,
      equal ? "equal" : "DIFFER");
  std::fflush(stdout);
  return equal;
}

int run_all() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < kRanks) {
    std::printf("skipped: this benchmark needs two GPUs that map each other, found %d\n", devices);
    return 77;
  }
  builtin_registries();  // provides device memory
  bool equal = true;
  for (const Shapes& shapes :
       {Shapes{"64 dense weights [4096, 8192]", 64, {4096, 8192}, {128, 128}},
        Shapes{"8 stacks of experts [32, 2048, 4096]", 8, {32, 2048, 4096}, {1, 128, 128}},
        Shapes{"256 weights [576, 7168]", 256, {576, 7168}, {128, 128}}}) {
    equal = compare(shapes) && equal;
  }
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace m2n::nccl

int main() {
  try {
    return m2n::nccl::run_all();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
}
