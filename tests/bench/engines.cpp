// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Figures of the engines: joining a world of a thousand ranks (threads, over the TCP store) with a
/// thousand parameters; what a round of 4 + 2 processes costs apart from moving bytes and taking
/// digests; and the same of 1 + 1 and 2 + 2 processes with the names of a model of experts, whose
/// tensors are made small.

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string_view>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/engine/deployment.hpp"
#include "core/engine/own_weights.hpp"
#include "core/engine/trainer_engine.hpp"
#include "tests/support/run_program.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Rank kTrainers = 500;
constexpr Rank kWorkers = 500;
constexpr int kParameters = 1000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A thousand parameters of four geometries, one row or column of each on every rank.
std::vector<OwnParameter> parameters(bool trainer, std::vector<std::byte>& memory) {
  using Layouts = std::array<std::shared_ptr<const Layout>, 4>;
  const auto make = [](Rank ranks, Rank start) {
    Layouts layouts;
    for (int i = 0; i < 4; ++i) {
      layouts[static_cast<std::size_t>(i)] = std::make_shared<const Layout>(Layout::sharded(
          {kTrainers, 4 + i}, DType::f32, Mesh({ranks}, start), {Placement::shard(0)}));
    }
    return layouts;
  };
  static const Layouts kSource = make(kTrainers, 0);
  static const Layouts kDestination = make(kWorkers, kTrainers);
  std::vector<OwnParameter> out;
  constexpr std::uint64_t kBytes = 2 * 8 * 4;
  memory.resize(kParameters * kBytes);
  for (int i = 0; i < kParameters; ++i) {
    const Shape shape{kTrainers, 4 + i % 4};
    const auto& layout = (trainer ? kSource : kDestination)[static_cast<std::size_t>(i % 4)];
    const std::string name = "layers." + std::to_string(i) + ".weight";
    out.push_back({{name, DType::f32, shape, {layout, {name}}},
                   {{memory.data() + static_cast<std::size_t>(i) * kBytes, kBytes}}});
  }
  return out;
}

/// Of all threads together, in user and system mode.
double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void bench_init() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const Registries registries = builtin_registries();
  EngineOptions options;
  options.deadline = std::chrono::minutes(5);
  std::vector<std::vector<std::byte>> memory(kTrainers + kWorkers);
  std::vector<std::unique_ptr<WeightSink>> sinks;
  std::vector<std::unique_ptr<WorkerEngine>> workers;
  std::vector<WorkerEngine*> deployment;
  for (Rank worker = 0; worker < kWorkers; ++worker) {
    sinks.push_back(
        make_own_sink(parameters(false, memory[static_cast<std::size_t>(kTrainers + worker)])));
    workers.push_back(
        std::make_unique<WorkerEngine>(registries, options, *sinks.back(), worker, kWorkers));
    deployment.push_back(workers.back().get());
  }
  std::vector<std::unique_ptr<WeightSource>> sources;
  std::vector<std::unique_ptr<TrainerEngine>> trainers;
  for (Rank trainer = 0; trainer < kTrainers; ++trainer) {
    sources.push_back(make_own_source(parameters(true, memory[static_cast<std::size_t>(trainer)])));
    trainers.push_back(std::make_unique<TrainerEngine>(registries, options));
  }
  const auto handler = make_deployment(deployment);
  ListenSocket socket = ListenSocket::reserve("127.0.0.1", 0);
  const std::uint16_t port = socket.port();

  std::vector<double> init_seconds(kTrainers);
  std::vector<double> init_cpu_seconds(kTrainers);
  std::vector<double> round_seconds(kTrainers);
  std::vector<std::thread> threads;
  const double cpu_before = cpu_seconds();
  for (Rank rank = 0; rank < kTrainers; ++rank) {
    threads.emplace_back([&, rank] {
      const auto i = static_cast<std::size_t>(rank);
      TrainerInit init;
      init.master_port = port;
      init.rank = rank;
      init.trainers = kTrainers;
      init.deployments.push_back({kWorkers, {}, rank == 0 ? make_local_client(handler) : nullptr});
      if (rank == 0) {
        init.listen_socket = std::move(socket);
      }
      const auto start = Clock::now();
      trainers[i]->init(std::move(init), *sources[i]);
      init_seconds[i] = seconds_since(start);
      init_cpu_seconds[i] = cpu_seconds() - cpu_before;
      round_seconds[i] = trainers[i]->send_weights().seconds;
      trainers[i]->shutdown();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::printf(
      "{\"bench\":\"engine init\",\"trainers\":%d,\"workers\":%d,\"parameters\":%d,"
      "\"init_seconds\":%.3f,\"init_cpu_seconds\":%.3f,\"first_round_seconds\":%.3f,"
      "\"limit_seconds\":10}\n",
      kTrainers, kWorkers, kParameters, *std::max_element(init_seconds.begin(), init_seconds.end()),
      *std::max_element(init_cpu_seconds.begin(), init_cpu_seconds.end()),
      *std::max_element(round_seconds.begin(), round_seconds.end()));
}

/// What a launch printed; ends the program when it failed.
boost::json::object figures_of(const testing::Outcome& outcome) {
  if (outcome.status != 0) {
    std::fputs(outcome.err.c_str(), stderr);
    std::exit(1);
  }
  return boost::json::parse(outcome.out).as_object();
}

void bench_round() {
  const testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "p.json") << R"json({"parameters": [
    {"name": "w", "dtype": "bf16", "shape": [64, 48],
     "source": {"mesh": {"dims": [4], "start": 0}, "placements": ["Shard(0)"]},
     "destination": {"mesh": {"dims": [2], "start": 4}, "placements": ["Shard(1)"]}}]})json";
  const testing::Outcome outcome =
      testing::run_program({M2N_PROGRAM, "launch", "--problem", "p.json", "--rounds", "200",
                            "--json", "--log", "off", "--job.change", "0", "--run.verify", "0"},
                           folder.path());
  const boost::json::object found = figures_of(outcome);
  const auto ms = [&](const char* key) { return found.at(key).to_number<double>() * 1e3; };
  std::printf(
      "{\"bench\":\"engine round\",\"trainers\":4,\"workers\":2,\"rounds\":200,"
      "\"round_ms_p50\":%.3f,\"move_ms_p50\":%.3f,\"integrity_ms_p50\":%.3f,"
      "\"control_ms_p50\":%.3f,\"limit_ms\":5}\n",
      ms("round_seconds"), ms("move_seconds"), ms("integrity_seconds"), ms("control_seconds"));
}

/// Qwen3-30B-A3B has 18,867 parameters.
void bench_parameters(int ranks) {
  const testing::TemporaryFolder folder;
  const std::string count = std::to_string(ranks);
  const testing::Outcome outcome = testing::run_program({M2N_PROGRAM,
                                                         "launch",
                                                         "--model",
                                                         M2N_MODELS "/qwen3-30b-a3b.json",
                                                         "--model.hidden_size",
                                                         "16",
                                                         "--model.moe_intermediate_size",
                                                         "8",
                                                         "--model.head_dim",
                                                         "8",
                                                         "--model.vocab_size",
                                                         "64",
                                                         "--source.ranks",
                                                         count,
                                                         "--sink.workers",
                                                         count,
                                                         "--rounds",
                                                         "20",
                                                         "--json",
                                                         "--log",
                                                         "off",
                                                         "--job.change",
                                                         "0",
                                                         "--run.verify",
                                                         "0"},
                                                        folder.path());
  const boost::json::object found = figures_of(outcome);
  const auto ms = [&](const char* key) { return found.at(key).to_number<double>() * 1e3; };
  std::printf(
      "{\"bench\":\"engine parameters\",\"trainers\":%d,\"workers\":%d,\"parameters\":18867,"
      "\"rounds\":20,\"init_ms\":%.1f,\"round_ms_p50\":%.3f,\"borrow_ms_p50\":%.3f,"
      "\"move_ms_p50\":%.3f,\"integrity_ms_p50\":%.3f,\"control_ms_p50\":%.3f,"
      "\"limit_ms\":100}\n",
      ranks, ranks, ms("init_seconds"), ms("round_seconds"), ms("borrow_seconds"),
      ms("move_seconds"), ms("integrity_seconds"), ms("control_seconds"));
}

}  // namespace
}  // namespace m2n

/// @param argv  "init", "round" or "parameters" runs that one alone.
int main(int argc, char** argv) try {
  const std::string_view only = argc > 1 ? argv[1] : "";
  if (only.empty() || only == "round") {
    m2n::bench_round();
  }
  if (only.empty() || only == "parameters") {
    m2n::bench_parameters(1);
    m2n::bench_parameters(2);
  }
  if (only.empty() || only == "init") {
    m2n::bench_init();
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "engines: %s\n", error.what());
  return 1;
}
