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

/// GB/s of the median round, by rank 1's clock, after its bytes were compared.
double measure(const std::string& transport, const Problem& problem, int rounds) {
  const Registries registries = builtin_registries();
  const Plan plan =
      registries.planners.create("direct", {})->plan(problem, Topology::single_island(2));
  const std::uint64_t bytes = summarize(plan, problem).bytes;
  const testing::TemporaryFolder folder;
  const auto ends = testing::run_ranks(testing::World::processes, 2, [&](Group& group) {
    const Rank rank = group.rank();
    std::vector<std::vector<std::byte>> memory;
    Buffers buffers;
    for (const Role role : {Role::source, Role::destination}) {
      auto& side = role == Role::source ? buffers.source : buffers.destination;
      for (const std::uint64_t size : problem.buffer_bytes(role, rank)) {
        memory.emplace_back(size, std::byte{1});
        side.push_back({size > 0 ? memory.back().data() : nullptr, size, MemorySpace::host, 0});
      }
    }
    const auto value = [](std::size_t tensor, std::size_t at) {
      return static_cast<std::byte>(tensor * 7 + at * 3 + (at >> 8));
    };
    if (rank == 0) {
      for (std::size_t i = 0; i < buffers.source.size(); ++i) {
        for (std::size_t at = 0; at < buffers.source[i].bytes; ++at) {
          buffers.source[i].data[at] = value(i, at);
        }
      }
    }
    const auto transport_object = registries.transports.create(transport, {});
    transport_object->connect(group, deadline_in(kLong));
    const auto session =
        transport_object->prepare(make_program(plan, problem, rank), buffers, deadline_in(kLong));
    std::vector<double> seconds;
    std::string path;
    for (int round = 0; round <= rounds; ++round) {
      group.barrier("round", deadline_in(kLong));
      session->start(static_cast<std::uint64_t>(round) + 1, deadline_in(kLong));
      const RoundReport report = session->wait(deadline_in(kLong));
      if (round > 0) {
        seconds.push_back(report.seconds);
      }
    }
    if (rank == 1) {
      for (std::size_t i = 0; i < buffers.destination.size(); ++i) {
        for (std::size_t at = 0; at < buffers.destination[i].bytes; ++at) {
          if (buffers.destination[i].data[at] != value(i, at)) {
            throw std::runtime_error("tensor " + std::to_string(i) + " differs");
          }
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

/// Bytes of a round, and of the buffers that it touches on each side.
constexpr std::uint64_t kFootprintMiB = 64;

void print(const std::string& what, double rate, double loopback, double in_cache,
           double of_memory) {
  std::printf("ucx   %-26s %6.2f GB/s; loopback %6.2f GB/s", what.c_str(), rate, loopback);
  if (of_memory > 0) {
    std::printf(
        "; ucx_perftest puts %6.2f GB/s with one such buffer, %6.2f GB/s with %d MiB; ratios %.2f, "
        "%.2f",
        in_cache, of_memory, static_cast<int>(kFootprintMiB), rate / in_cache, rate / of_memory);
  }
  std::printf("\n");
  std::fflush(stdout);
}

/// ucx_perftest puts one buffer again and again, which stays in a cache when it is small; a round
/// moves buffers that come from memory. So there are two limits: of one buffer as large as a piece,
/// and of one as large as all pieces.
void run() {
  double one_mib = 0;
  double of_memory = 0;
  for (const std::uint64_t mib : {1U, 4U, 16U, 64U}) {
    const Problem problem = tensors(kFootprintMiB / mib, mib * kMiB);
    const double in_cache = perftest(mib * kMiB, static_cast<int>(2048 / mib));
    one_mib = mib == 1 ? in_cache : one_mib;
    of_memory = perftest(kFootprintMiB * kMiB, 32);
    print("pieces of " + std::to_string(mib) + " MiB:", measure("ucx", problem, 20),
          measure("loopback", problem, 20), in_cache, of_memory);
  }
  const Problem small = tensors(20'000, 16 << 10);
  print("20,000 tensors of 16 KiB:", measure("ucx", small, 10), measure("loopback", small, 10),
        one_mib, of_memory);
}

}  // namespace
}  // namespace m2n

int main() {
  try {
    m2n::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
