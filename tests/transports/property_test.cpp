// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Random problems, planned by every planner, proved, moved as real bytes, and compared with a
/// truth that was worked out element by element.

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstring>
#include <iostream>
#include <mutex>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/api/scales.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "tests/support/placed_problem.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/support/ranks.hpp"

namespace m2n {
namespace {

using testing::Place;
using testing::PlacedProblem;

constexpr Rank kRanks = 8;
constexpr std::chrono::seconds kDeadline{60};
constexpr std::byte kUntouched{0xCD};

std::size_t slot(Rank rank) { return static_cast<std::size_t>(rank); }

/// Memory of one rank, by buffer number.
struct RankMemory {
  std::vector<std::vector<std::byte>> source;
  std::vector<std::vector<std::byte>> destination;
};

void write_bits(std::byte* at, DType dtype, std::uint64_t bits) {
  std::memcpy(at, &bits, bytes_of(dtype));  // little-endian, as every platform that we build for
}

std::vector<std::vector<std::byte>> allocate(const Problem& problem, Role role, Rank rank) {
  std::vector<std::vector<std::byte>> buffers;
  for (const std::uint64_t bytes : problem.buffer_bytes(role, rank)) {
    buffers.emplace_back(bytes, kUntouched);
  }
  return buffers;
}

std::vector<LocalBuffer> lend(std::vector<std::vector<std::byte>>& memory) {
  std::vector<LocalBuffer> buffers;
  for (auto& bytes : memory) {
    buffers.push_back({bytes.empty() ? nullptr : bytes.data(), bytes.size(), MemorySpace::host, 0});
  }
  return buffers;
}

std::size_t number_of(const BufferTable& table, const std::string& name) {
  return static_cast<std::size_t>(std::find(table.names.begin(), table.names.end(), name) -
                                  table.names.begin());
}

/// One world of rank threads that outlives many problems.
class Lane {
 public:
  Lane(std::vector<std::unique_ptr<Group>> groups, std::string transport, Options options)
      : groups_(std::move(groups)),
        transport_(std::move(transport)),
        options_(std::move(options)),
        registries_(builtin_registries()),
        transports_(groups_.size()) {}

  /// Moves with @p planner. @return what is wrong, or nothing.
  std::string check(const PlacedProblem& placed, const std::string& planner) {
    const Problem& problem = placed.problem;
    const Plan plan =
        registries_.planners.create(planner, {})->plan(problem, Topology::single_island(kRanks));
    check_plan(plan, problem);
    const testing::TestValues values(problem);
    std::vector<RankMemory> memory(kRanks);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      memory[slot(rank)].source = allocate(problem, Role::source, rank);
      memory[slot(rank)].destination = allocate(problem, Role::destination, rank);
    }
    for (const auto& [key, places] : placed.truth.source) {
      const std::size_t buffer = number_of(problem.buffers(Role::source), key.second);
      for (const Place& place : places) {
        const DType dtype = problem.parameters()[place.parameter].source_dtype();
        write_bits(memory[slot(key.first)].source[buffer].data() + place.offset_bytes, dtype,
                   values.source(place.parameter, place.flat));
      }
    }
    for (Rank rank = 0; rank < kRanks; ++rank) {
      compute_scales(problem, rank, lend(memory[slot(rank)].source));
    }
    move(problem, plan, memory);
    return compare(placed, values, memory);
  }

 private:
  void move(const Problem& problem, const Plan& plan, std::vector<RankMemory>& memory) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr error;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          std::unique_ptr<Transport>& transport = transports_[slot(rank)];
          const Deadline deadline = deadline_in(kDeadline);
          if (!transport) {
            transport = registries_.transports.create(transport_, {options_});
            transport->connect(*groups_[slot(rank)], deadline);
          }
          Program program = make_program(plan, problem, rank);
          program.world_size = kRanks;
          const auto session = transport->prepare(
              program, {lend(memory[slot(rank)].source), lend(memory[slot(rank)].destination)},
              deadline);
          session->start(1, deadline);
          session->wait(deadline);
        } catch (...) {
          const std::lock_guard lock(mutex);
          error = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  /// Every byte of every destination buffer, those that belong to no element too.
  static std::string compare(const PlacedProblem& placed, const testing::TestValues& values,
                             std::vector<RankMemory>& memory) {
    const Problem& problem = placed.problem;
    std::vector<RankMemory> expected(kRanks);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      expected[slot(rank)].destination = allocate(problem, Role::destination, rank);
    }
    for (const auto& [key, places] : placed.truth.destination) {
      const std::size_t buffer = number_of(problem.buffers(Role::destination), key.second);
      for (const Place& place : places) {
        const Parameter& parameter = problem.parameters()[place.parameter];
        write_bits(expected[slot(key.first)].destination[buffer].data() + place.offset_bytes,
                   parameter.destination_dtype(), values.destination(place.parameter, place.flat));
      }
    }
    for (Rank rank = 0; rank < kRanks; ++rank) {
      for (std::size_t buffer = 0; buffer < memory[slot(rank)].destination.size(); ++buffer) {
        if (memory[slot(rank)].destination[buffer] != expected[slot(rank)].destination[buffer]) {
          return "rank " + std::to_string(rank) + ", buffer '" +
                 problem.buffers(Role::destination).names[buffer] + "' differs";
        }
      }
    }
    return {};
  }

  std::vector<std::unique_ptr<Group>> groups_;
  std::string transport_;
  Options options_;
  Registries registries_;
  std::vector<std::unique_ptr<Transport>> transports_;  // connected once, for many sessions
};

using MakeGroups = std::vector<std::unique_ptr<Group>> (*)(Rank);

/// @p cases random problems through @p transport, in as many worlds as there are processors.
void check_random_problems(std::uint64_t cases, const std::string& transport,
                           MakeGroups make_groups, const Options& options = {}) {
  const std::uint64_t seed = testing::test_seed();
  std::vector<std::string> planners;
  const Registries registries = builtin_registries();
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back(entry.first);
  }
  std::atomic<std::uint64_t> next{0};
  std::mutex mutex;
  std::vector<std::string> failures;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < std::max(2U, std::thread::hardware_concurrency()); ++lane) {
    lanes.emplace_back([&] {
      Lane world(make_groups(kRanks), transport, options);
      for (std::uint64_t i = next++; i < cases; i = next++) {
        std::string wrong;
        const std::string& planner = planners[i % planners.size()];
        try {
          std::mt19937_64 random(seed + i);
          wrong = world.check(testing::placed_problem(random), planner);
        } catch (const std::exception& error) {
          wrong = error.what();
        }
        if (!wrong.empty()) {
          const std::lock_guard lock(mutex);
          failures.push_back("case M2N_TEST_SEED=" + std::to_string(seed + i) + " with " + planner +
                             ": " + wrong);
          next = cases;
        }
      }
    });
  }
  for (std::thread& lane : lanes) {
    lane.join();
  }
  for (const std::string& failure : failures) {
    BOOST_ERROR(failure);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::cout << cases << " problems over " << transport << " in " << seconds << " s\n";
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(property)

BOOST_AUTO_TEST_CASE(every_random_problem_arrives_element_by_element) {
  check_random_problems(testing::random_cases(), "loopback", make_thread_groups);
}

/// The path between processes, in threads: what arrives does not depend on the difference.
BOOST_AUTO_TEST_CASE(every_random_problem_arrives_through_shared_memory) {
  check_random_problems(testing::random_cases() / 10, "loopback", testing::make_groups_apart);
}

BOOST_AUTO_TEST_CASE(every_random_problem_arrives_over_ucx) {
  if (builtin_registries().transports.contains("ucx")) {
    check_random_problems(testing::random_cases() / 10, "ucx", testing::make_groups_apart);
    // As between machines, with rows and chunks so short that most regions have several.
    check_random_problems(
        testing::random_cases() / 40, "ucx", testing::make_groups_apart,
        {{"tls", "tcp"}, {"puts", "on"}, {"put_bytes", "16"}, {"chunk_bytes", "64"}});
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
