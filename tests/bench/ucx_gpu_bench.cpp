// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Weights from a process on one GPU to a process on another, by several transports: one table.
/// Every byte is compared before and after the timed rounds. Arguments are transports, e.g.
/// "nccl ucx:puts=off ucx"; M2N_BENCH_SCALE takes a part of each workload, M2N_BENCH_ROUNDS (10)
/// counts the timed rounds. Exits 77 without two GPUs.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <random>
#include <sstream>

#include "core/api/builtin.hpp"
#include "core/api/memory.hpp"
#include "tests/transports/nccl_world.hpp"

namespace m2n {
namespace {

using std::chrono::seconds;

constexpr std::size_t kWarmUps = 2;

Deadline soon() { return deadline_in(seconds(60)); }

double number_from(const char* variable, double otherwise) {
  const char* const text = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? std::strtod(text, nullptr) : otherwise;
}

std::vector<Shape> qwen3_8b(double scale) {
  constexpr Index kHidden = 4096;
  constexpr Index kInner = 12288;
  constexpr Index kWords = 151936;
  std::vector<Shape> shapes = {{kWords, kHidden}, {kHidden}};
  for (int layer = 0; layer < std::max(1, static_cast<int>(36 * scale)); ++layer) {
    for (const Shape& shape :
         {Shape{kHidden, kHidden}, Shape{1024, kHidden}, Shape{1024, kHidden},
          Shape{kHidden, kHidden}, Shape{128}, Shape{128}, Shape{kHidden}, Shape{kHidden},
          Shape{kInner, kHidden}, Shape{kInner, kHidden}, Shape{kHidden, kInner}}) {
      shapes.push_back(shape);
    }
  }
  shapes.push_back({kWords, kHidden});
  return shapes;
}

std::vector<Shape> shapes_of(const std::string& workload) {
  const double scale = number_from("M2N_BENCH_SCALE", 1);
  const auto some = [&](double count) {
    return static_cast<std::size_t>(std::max(1.0, count * scale));
  };
  if (workload == "qwen3-8b") {
    return qwen3_8b(scale);
  }
  return workload == "4000x1MiB" ? std::vector<Shape>(some(4000), Shape{1024, 512})
                                 : std::vector<Shape>(some(20000), Shape{128, 64});
}

Problem problem_of(const std::vector<Shape>& shapes) {
  std::vector<Parameter> parameters;
  for (const Shape& shape : shapes) {
    const auto on = [&](Rank rank) {
      return std::make_shared<const Layout>(
          Layout::sharded(shape, DType::bf16, Mesh({1}, rank), {Placement::replicate()}));
    };
    const std::string name = "w" + std::to_string(parameters.size());
    parameters.push_back({name, shape, {on(0), {name}}, {on(1), {name}}, false});
  }
  return Problem::make(std::move(parameters));
}

Options options_of(const std::string& transport) {
  Options options;
  std::istringstream words(transport);
  std::string word;
  std::getline(words, word, ':');
  while (std::getline(words, word, ':')) {
    const auto equals = word.find('=');
    options[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
  }
  return options;
}

/// One rank's tensors in one allocation; a receiver's in another order than the sender's.
class Weights {
 public:
  Weights(const Problem& problem, Rank rank) : problem_(problem), sends_(rank == 0) {
    const Memory& memory = memory_of(MemorySpace::device);
    const std::vector<std::uint64_t> bytes =
        problem.buffer_bytes(sends_ ? Role::source : Role::destination, rank);
    std::vector<std::size_t> order(bytes.size());
    std::iota(order.begin(), order.end(), 0);
    if (!sends_) {
      std::shuffle(order.begin(), order.end(), std::mt19937_64(7));
    }
    const std::uint64_t all = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    arena_ = memory.reserve(all + 16 * bytes.size(), static_cast<int>(rank));
    mine_.resize(bytes.size());
    for (const std::size_t i : order) {
      mine_[i] = arena_->take(bytes[i]);
    }
  }

  Buffers buffers() const {
    const std::vector<LocalBuffer> none(mine_.size());
    return sends_ ? Buffers{mine_, none} : Buffers{none, mine_};
  }

  void fill() {
    for (std::size_t i = 0; i < mine_.size(); ++i) {
      const Shape& shape = problem_.parameters()[i].shape;
      if (sends_) {
        memory_of(mine_[i]).fill_synthetic(shape, Box::whole(shape), DType::bf16, i, mine_[i],
                                           row_major(shape));
      } else {
        memory_of(mine_[i]).zero(mine_[i]);
      }
    }
  }

  std::uint64_t wrong_elements() const {
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < mine_.size(); ++i) {
      const Shape& shape = problem_.parameters()[i].shape;
      wrong += memory_of(mine_[i])
                   .compare({shape, Box::whole(shape), DType::bf16, mine_[i], row_major(shape)},
                            {DType::bf16, i, 0})
                   .count;
    }
    return wrong;
  }

 private:
  const Problem& problem_;
  bool sends_;
  std::unique_ptr<Arena> arena_;
  std::vector<LocalBuffer> mine_;
};

/// A row of the table, by both ranks; rank 0 prints it.
void row(Group& group, const std::string& argument) {
  const auto blank = argument.find(' ');
  const std::string workload = argument.substr(0, blank);
  const std::string transport = argument.substr(blank + 1);
  const Problem problem = problem_of(shapes_of(workload));
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(2));
  const auto moves = builtin_registries().transports.create(
      transport.substr(0, transport.find(':')),
      {options_of(transport), {}, static_cast<int>(group.rank())});
  moves->connect(group, soon());
  Weights weights(problem, group.rank());
  const auto session =
      moves->prepare(make_program(plan, problem, group.rank()), weights.buffers(), soon());
  std::vector<double> times;
  std::string path;
  std::uint64_t wrong = 0;
  std::uint64_t version = 0;
  const auto verified_round = [&] {
    weights.fill();
    group.barrier("filled", soon());
    session->start(++version, soon());
    path = session->wait(soon()).peers.at(0).path;
    wrong += weights.wrong_elements();
  };
  verified_round();
  const auto rounds = kWarmUps + static_cast<std::size_t>(number_from("M2N_BENCH_ROUNDS", 10));
  for (std::size_t i = 0; i < rounds; ++i) {
    group.barrier("begin", soon());
    const auto begin = std::chrono::steady_clock::now();
    session->start(++version, soon());
    session->wait(soon());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    double slowest = 0;
    for (const std::string& text : group.all_gather("time", std::to_string(took.count()), soon())) {
      slowest = std::max(slowest, std::stod(text));
    }
    if (i >= kWarmUps) {
      times.push_back(slowest);
    }
  }
  verified_round();
  for (const std::string& text : group.all_gather("wrong", std::to_string(wrong), soon())) {
    if (text != "0") {
      throw std::runtime_error(text + " elements are wrong");
    }
  }
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  std::uint64_t bytes = 0;
  for (const std::uint64_t one : problem.buffer_bytes(Role::source, 0)) {
    bytes += one;
  }
  if (group.rank() == 0) {
    std::printf("%-14s %-28s %8.2f %8.3f %8.3f %8.1f  %s\n", workload.c_str(), transport.c_str(),
                static_cast<double>(bytes) * 1e-9, median * 1e3, times.front() * 1e3,
                static_cast<double>(bytes) / median * 1e-9, path.c_str());
    std::fflush(stdout);
  }
}

int run(const std::vector<std::string>& transports) {
  std::printf("%-14s %-28s %8s %8s %8s %8s  %s\n", "workload", "transport", "GB", "ms", "best ms",
              "GB/s", "path");
  std::fflush(stdout);
  int status = 0;
  for (const char* workload : {"qwen3-8b", "4000x1MiB", "20000x16KiB"}) {
    for (const std::string& transport : transports) {
      auto ranks = testing::start_ranks(2, "row", std::string(workload) + ' ' + transport, false);
      for (const testing::RankEnd& end : testing::wait_ranks(ranks, seconds(180))) {
        if (end.status != 0) {
          std::printf("%-14s %-28s failed (%d): %s\n", workload, transport.c_str(), end.status,
                      end.error.c_str());
          status = 1;
        }
      }
    }
  }
  return status;
}

}  // namespace
}  // namespace m2n

int main(int argc, char** argv) {
  m2n::testing::rank_bodies()["row"] = m2n::row;
  m2n::testing::run_if_rank();
  (void)m2n::builtin_registries();  // brings the device's memory
  if (m2n::memory_of(m2n::MemorySpace::device).device_count() < 2) {
    std::cout << "skipped: needs two GPUs\n";
    return 77;
  }
  std::vector<std::string> transports(argv + 1, argv + argc);
  if (transports.empty()) {
    transports = {"nccl", "ucx:puts=off", "ucx"};
  }
  return m2n::run(transports);
}
