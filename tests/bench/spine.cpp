// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Figures of the spine, each beside its limit: moving 2 GiB over loopback, straight between
/// threads and through the shared memory of processes, against a plain parallel memcpy of the same
/// bytes in the same run, and planning Llama-3.1-8B from 8 to 4 ranks.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "tests/support/ranks.hpp"

namespace m2n {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Page-aligned memory that is touched before it is timed.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
    std::memset(data_.get(), 1, bytes);
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

constexpr Rank kTrainers = 4;
constexpr Rank kWorkers = 2;
constexpr int kRounds = 5;

/// 64 bf16 matrices of 32 MiB: FSDP2 over four trainers to TP over two workers, every other one
/// column-parallel (rows) and row-parallel (half rows of 4 KiB).
Problem matrices() {
  LayoutTable table;
  const Shape shape{4096, 4096};
  const auto source = table.intern(
      Layout::sharded(shape, DType::bf16, Mesh({kTrainers}, 0), {Placement::shard(0)}));
  std::vector<Parameter> parameters;
  for (int i = 0; i < 64; ++i) {
    const auto destination = table.intern(Layout::sharded(
        shape, DType::bf16, Mesh({kWorkers}, kTrainers), {Placement::shard(i % 2)}));
    const std::string name = "w" + std::to_string(i);
    parameters.push_back({name, shape, {source, {name}}, {destination, {name}}, false});
  }
  return Problem::make(std::move(parameters));
}

/// @param between  What the ranks pass for.
void bench_loopback(const char* between, std::vector<std::unique_ptr<Group>> groups) {
  const Problem problem = matrices();
  const Registries registries = builtin_registries();
  const Plan plan = registries.planners.create("direct", {})
                        ->plan(problem, Topology::single_island(problem.world_size()));
  const std::uint64_t bytes = summarize(plan, problem).bytes;
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<Buffers> buffers(static_cast<std::size_t>(problem.world_size()));
  const auto allocate = [&](Role role, Rank rank) {
    std::vector<LocalBuffer> out;
    for (const std::uint64_t size : problem.buffer_bytes(role, rank)) {
      if (size == 0) {
        out.emplace_back();
        continue;
      }
      memory.push_back(std::make_unique<Memory>(size));
      out.push_back({memory.back()->data(), size, MemorySpace::host, 0});
    }
    return out;
  };
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    buffers[static_cast<std::size_t>(rank)] = {allocate(Role::source, rank),
                                               allocate(Role::destination, rank)};
  }

  // The limit: as many threads as processors, each copying its whole buffers, one after the other.
  const unsigned processors = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::pair<std::byte*, std::byte*>> blocks;  // half a source shard to a half elsewhere
  const std::uint64_t block = bytes / 256;
  for (int i = 0; i < 64; ++i) {
    for (Rank rank = 0; rank < kTrainers; ++rank) {
      blocks.emplace_back(
          buffers[static_cast<std::size_t>(rank)].source[static_cast<std::size_t>(i)].data,
          buffers[static_cast<std::size_t>(kTrainers + rank % 2)]
                  .destination[static_cast<std::size_t>(i)]
                  .data +
              static_cast<std::ptrdiff_t>(rank / 2) * static_cast<std::ptrdiff_t>(block));
    }
  }
  const auto parallel_memcpy = [&] {
    const auto start = Clock::now();
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < processors; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = t; i < blocks.size(); i += processors) {
          std::memcpy(blocks[i].second, blocks[i].first, block);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return seconds_since(start);
  };

  std::vector<double> copied;
  std::vector<double> moved;
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    threads.emplace_back([&, rank] {
      Group& group = *groups[static_cast<std::size_t>(rank)];
      const auto deadline = [] { return deadline_in(std::chrono::minutes(5)); };
      const auto transport = registries.transports.create("loopback", {});
      transport->connect(group, deadline());
      const auto session = transport->prepare(make_program(plan, problem, rank),
                                              buffers[static_cast<std::size_t>(rank)], deadline());
      for (int round = 0; round <= kRounds; ++round) {
        if (rank == 0) {
          copied.push_back(parallel_memcpy());
        }
        group.barrier("memcpy", deadline());
        session->start(static_cast<std::uint64_t>(round) + 1, deadline());
        const RoundReport report = session->wait(deadline());
        if (rank == 0) {
          moved.push_back(report.seconds);
        }
        group.barrier("round", deadline());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  copied.erase(copied.begin());  // the warm-up
  moved.erase(moved.begin());
  const double limit = static_cast<double>(bytes) / median(copied) * 1e-9;
  const double rate = static_cast<double>(bytes) / median(moved) * 1e-9;
  std::printf(
      "loopback   between %s, FSDP2 x %d to TP%d, %.2f GiB: %.2f GB/s; parallel memcpy %.2f GB/s; "
      "ratio %.2f\n",
      between, kTrainers, kWorkers, static_cast<double>(bytes) / (1 << 30), rate, limit,
      rate / limit);
}

/// Llama-3.1-8B: FSDP2 over 8 trainers to TP over 4 workers, through the source, model and sink.
void bench_planning() {
  const Registries registries = builtin_registries();
  const auto family = registries.models.create("llama", {{{"hidden_size", "4096"},
                                                          {"num_hidden_layers", "32"},
                                                          {"num_attention_heads", "32"},
                                                          {"num_key_value_heads", "8"},
                                                          {"head_dim", "128"},
                                                          {"intermediate_size", "14336"},
                                                          {"vocab_size", "128256"},
                                                          {"tie_word_embeddings", "false"}}});
  const std::shared_ptr<const TensorValues> values =
      registries.values.create("synthetic", {{}, family->catalogue()});
  const auto source = registries.sources.create("fsdp", {{}, 0, 8, values, {}});
  const auto models =
      std::make_shared<const WorkerModels>(family->workers({4, 4}, values->catalogue()));
  const auto sink = registries.sinks.create("inplace", {{}, 8, 8, models, {}});
  std::vector<Parameter> parameters;
  const std::vector<Resolution> resolutions = sink->resolve(source->params());
  for (std::size_t i = 0; i < resolutions.size(); ++i) {
    const ParamSpec& spec = source->params()[i];
    parameters.push_back(
        {spec.name, spec.shape, spec.side, resolutions[i].side, resolutions[i].cast});
  }
  const Problem problem = Problem::make(std::move(parameters));
  const auto planner = registries.planners.create("direct", {});
  const Topology topology = Topology::single_island(12);
  std::vector<double> planned;
  std::vector<double> programmed;
  Plan plan;
  for (int i = 0; i < 11; ++i) {
    auto start = Clock::now();
    plan = planner->plan(problem, topology);
    planned.push_back(seconds_since(start));
    start = Clock::now();
    const Program program = make_program(plan, problem, 8);
    programmed.push_back(seconds_since(start));
  }
  std::printf(
      "planning   Llama-3.1-8B, %zu parameters, 8 to 4 ranks: plan %.2f ms, one rank's program "
      "%.2f ms\n",
      problem.parameters().size(), median(planned) * 1e3, median(programmed) * 1e3);
}

}  // namespace
}  // namespace m2n

int main() {
  try {
    m2n::bench_planning();
    const m2n::Rank ranks = m2n::kTrainers + m2n::kWorkers;
    m2n::bench_loopback("threads", m2n::make_thread_groups(ranks));
    m2n::bench_loopback("processes", m2n::testing::make_groups_apart(ranks));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
