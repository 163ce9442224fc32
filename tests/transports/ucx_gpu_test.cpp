// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// ucx between GPUs, through pinned staging and, where UCX knows CUDA, by puts: byte for byte, on
/// one device and on two, between threads and between processes. Needs a GPU; exits 77 without one.
/// M2N_TEST_UCX_CUDA says that UCX has to know CUDA.

#include <cuda_runtime.h>
#include <signal.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/device_rounds.hpp"
#include "tests/transports/nccl_world.hpp"

namespace m2n {
namespace {

/// Rank processes run their body and end here; without a GPU, so does the test.
struct Start {
  Start() {
    testing::run_if_rank();
    int devices = 0;
    const cudaError_t result = cudaGetDeviceCount(&devices);
    if (result != cudaSuccess || devices < 1) {
      std::cout << "skipped: needs a GPU, found "
                << (result == cudaSuccess ? std::string("none") : cudaGetErrorString(result))
                << std::endl;
      std::_Exit(77);
    }
  }
};
BOOST_TEST_GLOBAL_FIXTURE(Start);

Deadline soon() { return deadline_in(std::chrono::seconds(60)); }

void require(bool ok, const std::string& what) {
  if (!ok) {
    throw std::runtime_error(what);
  }
}

/// What a body is told: how many devices the ranks share, options, and what else it wants.
struct Orders {
  int devices = 1;
  std::uint64_t seed = 0;
  std::uint64_t count = 0;  ///< Of problems, or of bytes.
  Options options;

  std::string text() const {
    std::string out =
        std::to_string(devices) + ' ' + std::to_string(seed) + ' ' + std::to_string(count);
    for (const auto& [key, value] : options) {
      out += ' ' + key + ' ' + value;
    }
    return out;
  }
  static Orders parse(const std::string& text) {
    std::istringstream in(text);
    Orders out;
    in >> out.devices >> out.seed >> out.count;
    for (std::string key, value; in >> key >> value;) {
      out.options[key] = value;
    }
    return out;
  }
  int device_of(Rank rank) const { return static_cast<int>(rank) % devices; }
};

std::unique_ptr<Transport> make(const Options& options, int device) {
  return builtin_registries().transports.create("ucx", {options, {}, device});
}

void random_body(Group& group, const std::string& text) {
  const Orders orders = Orders::parse(text);
  const auto transport = make(orders.options, orders.device_of(group.rank()));
  for (const std::string& path : testing::move_random_problems(
           group, *transport, orders.device_of(group.rank()), orders.seed, orders.count)) {
    require(path.find("staged") == std::string::npos ||
                path.find("staged through pinned memory") != std::string::npos,
            path);
  }
}

/// One tensor of bytes from rank 0 to rank 1, on their devices.
class OneTensor {
 public:
  OneTensor(Group& group, const Orders& orders)
      : sends_(group.rank() == 0),
        bytes_(orders.count),
        problem_(make_problem(static_cast<Index>(bytes_))),
        transport_(make(orders.options, orders.device_of(group.rank()))) {
    transport_->connect(group, soon());
    const Memory& memory = memory_of(MemorySpace::device);
    arena_ = memory.reserve(bytes_, orders.device_of(group.rank()));
    buffer_ = arena_->take(bytes_);
    plan_ = builtin_registries()
                .planners.create("direct", {})
                ->plan(problem_, Topology::single_island(2));
    session_ =
        transport_->prepare(make_program(plan_, problem_, group.rank()),
                            sends_ ? Buffers{{buffer_}, {{}}} : Buffers{{{}}, {buffer_}}, soon());
  }

  RoundReport round(std::uint64_t version, Deadline deadline) {
    const std::vector<std::byte> values = make_values(version);
    if (sends_) {
      memory_of(buffer_).write(buffer_, values);
    }
    session_->start(version, deadline);
    RoundReport report = session_->wait(deadline);
    if (!sends_) {
      std::vector<std::byte> arrived(bytes_);
      memory_of(buffer_).read(buffer_, arrived);
      require(arrived == values, "bytes of version " + std::to_string(version) + " differ");
    }
    return report;
  }

 private:
  static Problem make_problem(Index bytes) {
    const auto on = [&](Rank rank) {
      return std::make_shared<const Layout>(
          Layout::sharded({bytes}, DType::u8, Mesh({1}, rank), {Placement::replicate()}));
    };
    return Problem::make({{"w", {bytes}, {on(0), {"w"}}, {on(1), {"w"}}, false}});
  }
  std::vector<std::byte> make_values(std::uint64_t version) const {
    std::vector<std::byte> values(bytes_);
    for (std::size_t i = 0; i < bytes_; ++i) {
      values[i] = static_cast<std::byte>(i * 7 + (i >> 8) * 3 + (i >> 17) * 5 + version * 101);
    }
    return values;
  }

  bool sends_;
  std::uint64_t bytes_;
  Problem problem_;
  Plan plan_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Arena> arena_;
  LocalBuffer buffer_;
  std::unique_ptr<Session> session_;
};

void large_body(Group& group, const std::string& text) {
  OneTensor tensor(group, Orders::parse(text));
  for (std::uint64_t version = 1; version <= 3; ++version) {
    const RoundReport report = tensor.round(version, soon());
    const std::string line = "rank " + std::to_string(group.rank()) + ": " +
                             report.peers.at(0).path + ", " + std::to_string(report.seconds) + " s";
    if (version == 3) {
      std::cout << line + "\n" << std::flush;
    }
  }
}

void direct_body(Group& group, const std::string& text) {
  OneTensor tensor(group, Orders::parse(text));
  const std::string path = tensor.round(1, soon()).peers.at(0).path;
  require(path.starts_with("direct (") && path.find("cuda_ipc") != std::string::npos, path);
}

/// Rank 1 is killed between two rounds; rank 0 must be out by its deadline.
void killed_body(Group& group, const std::string& text) {
  OneTensor tensor(group, Orders::parse(text));
  tensor.round(1, soon());
  group.barrier("first round", soon());
  if (group.rank() == 1) {
    kill(getpid(), SIGKILL);
  }
  const auto begin = std::chrono::steady_clock::now();
  std::string error;
  try {
    tensor.round(2, deadline_in(std::chrono::seconds(5)));
  } catch (const TransportError& thrown) {
    error = thrown.what();
  }
  require(error.find("rank 1") != std::string::npos || error.find(": 1") != std::string::npos,
          "rank 1 is named: " + error);
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10), "out in time");
}

struct Bodies {
  Bodies() {
    testing::rank_bodies()["ucx random"] = random_body;
    testing::rank_bodies()["ucx large"] = large_body;
    testing::rank_bodies()["ucx direct"] = direct_body;
    testing::rank_bodies()["ucx killed"] = killed_body;
  }
};
const Bodies kBodies;

void threads_succeed(Rank count, const std::string& body, const Orders& orders) {
  auto groups = make_thread_groups(count);
  std::vector<std::string> failures(groups.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        testing::rank_bodies().at(body)(*groups[rank], orders.text());
      } catch (const std::exception& error) {
        failures[rank] = error.what();
      }
      groups[rank].reset();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    BOOST_TEST(failures[rank].empty(), orders.text()
                                           << ": rank " << rank << ": " << failures[rank]);
  }
}

void processes_succeed(Rank count, const std::string& body, const Orders& orders) {
  auto ranks = testing::start_ranks(count, body, orders.text(), false);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(100));
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    BOOST_TEST(ends[rank].status == 0, orders.text()
                                           << ": rank " << rank << " ended with "
                                           << ends[rank].status << ": " << ends[rank].error);
  }
}

/// 1, and 2 where there are so many.
std::vector<int> device_counts() {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  return devices > 1 ? std::vector<int>{1, 2} : std::vector<int>{1};
}

/// Small slots, so that most regions take several; those of real use; and short puts, where any
/// are.
const std::vector<Options> kWays = {{{"device_slot_bytes", "4096"}},
                                    {{"device_put_bytes", "64"}},
                                    {},
                                    {{"tls", "tcp"}, {"slow_lanes", "allow"}}};

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(ucx_gpu)

BOOST_AUTO_TEST_CASE(random_problems_arrive_between_threads) {
  const std::uint64_t seed = testing::test_seed();
  for (const int devices : device_counts()) {
    for (const Options& options : kWays) {
      threads_succeed(4, "ucx random", {devices, seed, 40, options});
    }
  }
}

BOOST_AUTO_TEST_CASE(random_problems_arrive_between_processes) {
  const std::uint64_t seed = testing::test_seed();
  for (const int devices : device_counts()) {
    for (const Options& options : kWays) {
      processes_succeed(4, "ucx random", {devices, seed, 40, options});
    }
  }
}

BOOST_AUTO_TEST_CASE(a_large_tensor_arrives_with_the_values_of_now) {
  for (const int devices : device_counts()) {
    const Orders orders{devices, 0, 500'000'003, {}};
    threads_succeed(2, "ucx large", orders);
    processes_succeed(2, "ucx large", orders);
  }
}

boost::test_tools::assertion_result ucx_must_know_cuda(boost::unit_test::test_unit_id) {
  return std::getenv("M2N_TEST_UCX_CUDA") != nullptr;  // NOLINT(concurrency-mt-unsafe)
}

BOOST_AUTO_TEST_CASE(bytes_go_from_device_to_device,
                     *boost::unit_test::precondition(ucx_must_know_cuda)) {
  for (const int devices : device_counts()) {
    for (const char* put_bytes : {"1", "1000000000"}) {  // by UCX, and by our kernels
      processes_succeed(2, "ucx direct",
                        {devices, 0, 100'000'003, {{"device_put_bytes", put_bytes}}});
    }
  }
}

BOOST_AUTO_TEST_CASE(a_killed_rank_lets_the_other_out) {
  auto ranks = testing::start_ranks(
      2, "ucx killed", Orders{device_counts().back(), 0, 100'000'000, {}}.text(), false);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(60));
  BOOST_TEST(ends[1].status == -SIGKILL);
  BOOST_TEST(ends[0].status == 0, ends[0].error);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
