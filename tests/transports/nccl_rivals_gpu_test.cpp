// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transports to compare with, on GPUs: byte for byte, and what goes wrong. Needs two GPUs that
/// map each other; exits 77 without them. NVIDIA's library is looked for where M2N_NCCL_M2N_LIBRARY
/// says, or where the loader looks; its cases are skipped, with a word, where it cannot be had.

#include <signal.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <iostream>
#include <set>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/nccl_gpu.hpp"
#include "tests/transports/placed_memory.hpp"
#include "transports/nccl/communicator.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl_m2n/forms.hpp"
#include "transports/nccl_m2n/library.hpp"

namespace m2n::nccl {
namespace {

namespace utf = boost::unit_test;
using testing::HostBytes;

std::string library_path() {
  const char* const given = std::getenv("M2N_NCCL_M2N_LIBRARY");  // NOLINT(concurrency-mt-unsafe)
  return given != nullptr ? given : "libnccl_m2n.so";
}

Options m2n_options(Options more = {}) {
  more["library"] = library_path();
  return more;
}

/// Why NVIDIA's library cannot be used here; empty when it can.
std::string no_library() {
  try {
    nccl_m2n::Library::load(library_path());
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

boost::test_tools::assertion_result has_library(utf::test_unit_id) {
  static const std::string kWhy = no_library();
  boost::test_tools::assertion_result result(kWhy.empty());
  result.message() << kWhy;
  return result;
}

/// Bytes of one rank in device memory, at any alignment; or left in host memory.
class Lent {
 public:
  Lent(testing::PlacedMemory memory, bool on_device, int device, std::mt19937_64& random)
      : memory_(std::move(memory)), on_device_(on_device) {
    for (auto* side : {&memory_.source, &memory_.destination}) {
      for (HostBytes& bytes : *side) {
        LocalBuffer lent{bytes.data(), bytes.size(), MemorySpace::host, 0};
        if (on_device && !bytes.empty()) {
          const std::uint64_t shift = random() % 16;
          device_.emplace_back(bytes.size() + shift);
          lent = {device_.back().data() + shift, bytes.size(), MemorySpace::device, device};
          check(cudaMemcpy(lent.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
                "upload");
        } else if (bytes.empty()) {
          lent = {};
        }
        (side == &memory_.source ? buffers.source : buffers.destination).push_back(lent);
      }
    }
    check(cudaDeviceSynchronize(), "upload");
  }

  const std::vector<HostBytes>& destination() {
    for (std::size_t i = 0; on_device_ && i < buffers.destination.size(); ++i) {
      HostBytes& bytes = memory_.destination[i];
      if (!bytes.empty()) {
        check(cudaMemcpy(bytes.data(), buffers.destination[i].data, bytes.size(),
                         cudaMemcpyDeviceToHost),
              "download");
      }
    }
    return memory_.destination;
  }

  Buffers buffers;

 private:
  testing::PlacedMemory memory_;
  bool on_device_;
  std::vector<DeviceMemory> device_;
};

/// Also that sources come before destinations: otherwise the library goes through a network card.
bool expressible(const Problem& problem) {
  try {
    for (std::uint32_t p = 0; p < problem.parameters().size(); ++p) {
      const nccl_m2n::Form form = nccl_m2n::express(problem, p, {});
      if (form.source.start > form.destination.start) {
        return false;
      }
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct Moved {
  std::uint64_t cases = 0;
  std::set<std::string> paths;
};

/// Moves random problems seed, seed + 1, ..., two rounds each, over one connection. Throws what is
/// wrong.
Moved move_random_problems(Group& group, const std::string& name, const Options& options,
                           std::uint64_t seed, std::uint64_t cases, bool only_expressible) {
  const Registries registries = builtin_registries();
  std::vector<std::string> planners;
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back(entry.first);
  }
  const int device = select_device(group.rank());
  const auto transport = make(options, name);
  transport->connect(group, soon());
  Moved moved;
  for (std::uint64_t i = 0; moved.cases < cases; ++i) {
    const std::string where = name + ", case M2N_TEST_SEED=" + std::to_string(seed + i);
    std::mt19937_64 random(seed + i);
    testing::PlacedLimits limits;
    limits.ranks = group.size();
    limits.elements = i % 3 == 0 ? 20'000 : 160;
    limits.casts = false;
    limits.views = !only_expressible;
    const testing::PlacedProblem placed = testing::placed_problem(random, limits);
    if (only_expressible && !expressible(placed.problem)) {
      continue;
    }
    const Plan plan = registries.planners.create(planners[i % planners.size()], {})
                          ->plan(placed.problem, Topology::single_island(group.size()));
    Lent lent(testing::placed_memory(placed, group.rank()), i % 4 != 1, device, random);
    Program program = make_program(plan, placed.problem, group.rank());
    program.world_size = group.size();
    const auto session = transport->prepare(program, lent.buffers, soon());
    for (std::uint64_t round = 1; round <= 2; ++round) {
      session->start(round, soon());
      for (const PeerTraffic& peer : session->wait(soon()).peers) {
        moved.paths.insert(peer.path);
      }
    }
    require(lent.destination() == testing::placed_expectation(placed, group.rank()),
            where + ": bytes differ");
    group.barrier("checked", soon());
    ++moved.cases;
  }
  return moved;
}

// ------------------------------------------------------------------------ bodies of processes

/// "packed 7 40": method, seed, cases.
void reference_body(Group& group, const std::string& argument) {
  move_random_problems(group, "nccl_reference",
                       {{"method", word(argument, 0)}, {"pack_bytes", "20000"}},
                       std::stoull(word(argument, 1)), std::stoull(word(argument, 2)), false);
}

/// "7 40": seed, cases.
void m2n_body(Group& group, const std::string& argument) {
  const Moved moved =
      move_random_problems(group, "nccl_m2n", m2n_options(), std::stoull(word(argument, 0)),
                           std::stoull(word(argument, 1)), true);
  for (const std::string& path : moved.paths) {
    require(path != "not logged", "the library names its path");
  }
}

/// Rank 1 is killed between rounds; rank 0 must be out by its deadline.
void fault_body(Group& group, const std::string& argument) {
  const std::string name = word(argument, 0);
  const Options options =
      name == "nccl_m2n" ? m2n_options() : Options{{"method", word(argument, 1)}};
  const Simple c = Simple::make(1 << 20, group.size());
  const int device = select_device(group.rank());
  const auto transport = make(options, name);
  transport->connect(group, soon());
  const bool source = group.rank() == 0;
  DeviceMemory memory(8 << 20);
  const LocalBuffer buffer{memory.data(), 8 << 20, MemorySpace::device, device};
  const auto session = transport->prepare(
      make_program(c.plan, c.problem, group.rank()),
      {{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}}, soon());
  session->start(1, soon());
  session->wait(soon());
  group.barrier("first round", soon());
  if (group.rank() == 1) {
    kill(getpid(), SIGKILL);
  }
  const auto begin = std::chrono::steady_clock::now();
  std::string text;
  try {
    for (std::uint64_t round = 2; round < 1000; ++round) {  // what is sent early may be taken in
      session->start(round, deadline_in(std::chrono::seconds(3)));
      session->wait(deadline_in(std::chrono::seconds(3)));
    }
  } catch (const TransportError& error) {
    text = error.what();
    require(error.code() == Errc::timed_out || error.code() == Errc::peer_lost, text);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  require(text.find("1") != std::string::npos, "rank 1 is named: " + text);
  require(took < std::chrono::seconds(20), "out after " + std::to_string(took.count()) + " s");
}

// ------------------------------------------------------------------------ cases

const RankBodyEntry kReference("reference", reference_body);
const RankBodyEntry kM2n("m2n", m2n_body);
const RankBodyEntry kFault("fault", fault_body);

void survivor_gets_out(const std::string& argument) {
  auto ranks = testing::start_ranks(2, "fault", argument, false);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(60));
  BOOST_TEST(ends[1].status == -SIGKILL);
  BOOST_TEST(ends[0].status == 0, argument << ": rank 0 ended with " << ends[0].status << " after "
                                           << ends[0].seconds << " s: " << ends[0].error);
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_rivals)

BOOST_AUTO_TEST_CASE(random_problems_between_threads_arrive_by_every_method) {
  const std::uint64_t seed = testing::test_seed();
  for (const char* method : {"packed", "broadcast", "group", "calls"}) {
    for (const char* unpack : {"each", "fused"}) {
      none_failed(run_threads(2, [&](Group& group) {
        move_random_problems(group, "nccl_reference",
                             {{"method", method}, {"unpack", unpack}, {"pack_bytes", "20000"}},
                             seed, 12, false);
      }));
    }
  }
}

BOOST_AUTO_TEST_CASE(random_problems_between_processes_arrive_with_4_to_4_ranks) {
  const std::string seed = std::to_string(testing::test_seed());
  for (const char* method : {"packed", "broadcast", "group", "calls"}) {
    ranks_succeed(8, "reference", std::string(method) + " " + seed + " 6", true);
  }
}

BOOST_AUTO_TEST_CASE(every_method_moves_the_values_of_now) {
  for (const char* method : {"packed", "broadcast", "group", "calls"}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(20'000'003, group.size()), {{"method", method}}, 3,
                    "nccl_reference");
    }));
  }
}

BOOST_AUTO_TEST_CASE(a_killed_rank_lets_the_other_out_by_its_deadline) {
  for (const char* method : {"packed", "broadcast", "group", "calls"}) {
    survivor_gets_out(std::string("nccl_reference ") + method);
  }
}

BOOST_AUTO_TEST_CASE(an_nccl_that_is_too_old_is_refused_with_both_versions) {
  if (library_version() >= nccl_m2n::kOldestNccl) {
    BOOST_TEST_MESSAGE("NCCL is new enough here");
    return;
  }
  for (const std::string& text : run_threads(
           2, [&](Group& group) { make(m2n_options(), "nccl_m2n")->connect(group, soon()); })) {
    BOOST_TEST(text.find("this process runs NCCL 2.") != std::string::npos, text);
    BOOST_TEST(text.find("needs 2.30.5 or newer") != std::string::npos, text);
  }
}

BOOST_AUTO_TEST_CASE(nvidias_library_moves_what_it_can_express_between_threads,
                     *utf::precondition(has_library)) {
  const std::uint64_t seed = testing::test_seed();
  none_failed(run_threads(2, [&](Group& group) {
    const Moved moved = move_random_problems(group, "nccl_m2n", m2n_options(), seed, 40, true);
    for (const std::string& path : moved.paths) {
      std::cout << "path of rank " + std::to_string(group.rank()) + ": " + path + "\n";
      require(path != "not logged", "the library names its path");
    }
  }));
}

BOOST_AUTO_TEST_CASE(nvidias_library_moves_what_it_can_express_between_processes,
                     *utf::precondition(has_library)) {
  ranks_succeed(2, "m2n", std::to_string(testing::test_seed()) + " 30", false);
}

BOOST_AUTO_TEST_CASE(nvidias_library_moves_the_values_of_now_with_every_setting,
                     *utf::precondition(has_library)) {
  for (const Options& options : {Options{}, Options{{"internal_streams", "off"}},
                                 Options{{"staging", "268435456:2"}}, Options{{"ctas", "4"}}}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(20'000'003, group.size()), m2n_options(options), 3,
                    "nccl_m2n");
    }));
  }
}

BOOST_AUTO_TEST_CASE(a_tensor_beyond_the_staging_is_refused_before_a_byte_moves,
                     *utf::precondition(has_library)) {
  for (const std::string& text : run_threads(2, [&](Group& group) {
         simple_rounds(group, Simple::make(1 << 20, group.size()),
                       m2n_options({{"staging", "1048576:2"}}), 1, "nccl_m2n");
       })) {
    BOOST_TEST(text.find("option staging=BYTES:SLOTS") != std::string::npos, text);
  }
}

BOOST_AUTO_TEST_CASE(a_killed_rank_lets_nvidias_library_out_by_its_deadline,
                     *utf::precondition(has_library)) {
  survivor_gets_out("nccl_m2n -");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl
