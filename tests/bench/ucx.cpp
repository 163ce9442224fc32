// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// One process moves tensors to another over ucx, beside what ucx_perftest reaches for one-sided
/// puts in the same run: whole pieces of 1 MiB and more, and 20,000 tensors of 16 KiB.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/api/builtin.hpp"
#include "tests/support/ranks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

using std::chrono::milliseconds;
constexpr std::uint64_t kMiB = 1 << 20;
constexpr milliseconds kLong{120'000};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// @p count tensors of @p bytes, each whole from rank 0 to rank 1.
Problem tensors(std::size_t count, std::uint64_t bytes) {
  const Shape shape{static_cast<Index>(bytes)};
  LayoutTable table;
  const auto on = [&](Rank rank) {
    return table.intern(
        Layout::sharded(shape, DType::u8, Mesh({1}, rank), {Placement::replicate()}));
  };
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = "w" + std::to_string(i);
    parameters.push_back({name, shape, {on(0), {name}}, {on(1), {name}}, false});
  }
  return Problem::make(std::move(parameters));
}

struct Workload {
  std::size_t count;        ///< Of tensors in a round,
  std::uint64_t bytes;      ///< each of so many bytes.
  std::uint64_t footprint;  ///< Bytes of memory on each side, which the tensors take in turns.
};

/// GB/s of the median round, by rank 1's clock, after its bytes were compared.
double measure(const std::string& transport, const Options& options, const Workload& workload,
               int rounds) {
  const Problem problem = tensors(workload.count, workload.bytes);
  const Registries registries = builtin_registries();
  const Plan plan =
      registries.planners.create("direct", {})->plan(problem, Topology::single_island(2));
  const std::uint64_t bytes = summarize(plan, problem).bytes;
  const testing::TemporaryFolder folder;
  const auto ends = testing::run_ranks(testing::World::processes, 2, [&](Group& group) {
    const Rank rank = group.rank();
    std::vector<std::byte> memory(workload.footprint, std::byte{1});
    const auto value = [](std::size_t at) {
      return static_cast<std::byte>(at * 3 + (at >> 8) + (at >> 14) * 7);
    };
    for (std::size_t at = 0; rank == 0 && at < memory.size(); ++at) {
      memory[at] = value(at);
    }
    Buffers buffers;
    for (const Role role : {Role::source, Role::destination}) {
      auto& side = role == Role::source ? buffers.source : buffers.destination;
      for (const std::uint64_t size : problem.buffer_bytes(role, rank)) {
        std::byte* const data = memory.data() + side.size() * workload.bytes % workload.footprint;
        side.push_back({size > 0 ? data : nullptr, size, MemorySpace::host, 0});
      }
    }
    const auto transport_object = registries.transports.create(transport, {options});
    transport_object->connect(group, deadline_in(kLong));
    const auto session =
        transport_object->prepare(make_program(plan, problem, rank), buffers, deadline_in(kLong));
    std::vector<double> seconds;
    for (int round = 0; round <= rounds; ++round) {
      group.barrier("round", deadline_in(kLong));
      session->start(static_cast<std::uint64_t>(round) + 1, deadline_in(kLong));
      const RoundReport report = session->wait(deadline_in(kLong));
      if (round > 0) {
        seconds.push_back(report.seconds);
      }
    }
    if (rank == 1) {
      for (std::size_t at = 0; at < memory.size(); ++at) {
        if (memory[at] != value(at)) {
          throw std::runtime_error("byte " + std::to_string(at) + " differs");
        }
      }
      std::ofstream(folder / "seconds") << median(seconds);
    }
    group.barrier("end", deadline_in(kLong));
  });
  for (const testing::RankEnd& end : ends) {
    if (!end.failure.empty()) {
      throw std::runtime_error(end.failure);
    }
  }
  return static_cast<double>(bytes) / std::stod(testing::read_file(folder / "seconds")) * 1e-9;
}

pid_t run_perftest(std::vector<std::string> words, const std::string& output) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (std::freopen(output.c_str(), "w", stdout) == nullptr) {
      ::_exit(127);
    }
    std::freopen("/dev/null", "w", stderr);
    std::vector<char*> arguments;
    for (std::string& word : words) {
      arguments.push_back(word.data());
    }
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  return child;
}

/// GB/s that ucx_perftest reports for puts of @p bytes; 0 when it is not installed.
double perftest(std::uint64_t bytes, int iterations) {
  const testing::TemporaryFolder folder;
  const std::string port = std::to_string(20'000 + ::getpid() % 20'000);
  const pid_t server =
      run_perftest({"ucx_perftest", "-p", port, "-t", "ucp_put_bw"}, (folder / "server").string());
  double rate = 0;
  for (int attempt = 0; attempt < 20 && rate == 0; ++attempt) {  // until the server listens
    std::this_thread::sleep_for(milliseconds(200));
    const pid_t client =
        run_perftest({"ucx_perftest", "127.0.0.1", "-p", port, "-t", "ucp_put_bw", "-s",
                      std::to_string(bytes), "-n", std::to_string(iterations), "-w", "10", "-f"},
                     (folder / "client").string());
    int status = 0;
    ::waitpid(client, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
      break;
    }
    // iterations, three latencies, two bandwidths in MB (2^20) a second, two message rates
    std::istringstream lines(testing::read_file(folder / "client"));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::vector<double> numbers;
      for (double number = 0; words >> number;) {
        numbers.push_back(number);
      }
      if (numbers.size() >= 8 && numbers[0] == iterations) {
        rate = numbers[5] * static_cast<double>(kMiB) * 1e-9;
      }
    }
  }
  ::kill(server, SIGKILL);
  ::waitpid(server, nullptr, 0);
  return rate;
}

/// How often each side of a comparison is measured, in turns.
constexpr int kTurns = 5;
/// More than caches hold.
constexpr std::uint64_t kMemory = 64 * kMiB;

/// A round of @p workload beside puts of @p put_bytes of one buffer, in turns: medians, and the
/// best turns, which suffer least from what else runs.
void compare(const std::string& what, const Options& options, const Workload& workload,
             std::uint64_t put_bytes) {
  std::vector<double> ucx;
  std::vector<double> loopback;
  std::vector<double> puts;
  std::vector<double> ratios;
  for (int turn = 0; turn < kTurns; ++turn) {
    const double before = perftest(put_bytes, static_cast<int>(1024 * kMiB / put_bytes));
    ucx.push_back(measure("ucx", options, workload, 20));
    const double after = perftest(put_bytes, static_cast<int>(1024 * kMiB / put_bytes));
    loopback.push_back(measure("loopback", {}, workload, 20));
    puts.push_back((before + after) / 2);
    ratios.push_back(ucx.back() / puts.back());
  }
  std::printf("ucx   %-42s %6.2f GB/s; loopback %6.2f GB/s", what.c_str(), median(ucx),
              median(loopback));
  if (median(puts) > 0) {
    const auto best = [](const std::vector<double>& rates) {
      return *std::max_element(rates.begin(), rates.end());
    };
    std::printf("; ucx_perftest puts %6.2f GB/s; ratio %.2f, best turn by best turn %.2f",
                median(puts), median(ratios), best(ucx) / best(puts));
  }
  std::printf("\n");
  std::fflush(stdout);
}

/// ucx_perftest puts one buffer again and again, which stays in a cache when it is small. So a
/// round does the same, or both go through more memory than a cache holds.
void run(const Options& options) {
  for (const std::uint64_t mib : {1U, 4U}) {
    compare("pieces of " + std::to_string(mib) + " MiB, one buffer:", options,
            {32 / mib, mib * kMiB, mib * kMiB}, mib * kMiB);
  }
  for (const std::uint64_t mib : {1U, 4U, 16U, 64U}) {
    compare("pieces of " + std::to_string(mib) + " MiB, 64 MiB of memory:", options,
            {64 / mib, mib * kMiB, kMemory}, kMemory);
  }
  constexpr std::uint64_t kSmall = 16 << 10;
  compare("2,000 tensors of 16 KiB, one buffer:", options, {2'000, kSmall, kMiB}, kMiB);
  compare("20,000 tensors of 16 KiB, memory of their own:", options,
          {20'000, kSmall, 20'000 * kSmall}, kMemory);
}

}  // namespace
}  // namespace m2n

/// Arguments: settings of ucx, KEY=VALUE.
int main(int argc, char** argv) {
  m2n::Options options;
  for (const std::string& word : std::vector<std::string>(argv + 1, argv + argc)) {
    const std::size_t equals = word.find('=');
    options[word.substr(0, equals)] = equals == word.npos ? "" : word.substr(equals + 1);
  }
  try {
    m2n::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
