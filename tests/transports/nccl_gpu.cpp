// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transports/nccl_gpu.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <thread>

#include "core/rendezvous/thread_group.hpp"

namespace m2n::nccl {
namespace {

/// Rank processes run their body and end here; without two GPUs, so does the test.
struct Start {
  Start() {
    // Streams of ranks that share a device must not queue behind one another.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // NOLINT(concurrency-mt-unsafe)
    testing::run_if_rank();
    int devices = 0;
    const cudaError_t result = cudaGetDeviceCount(&devices);
    if (result != cudaSuccess || devices < 2) {
      std::cout << "skipped: needs two GPUs that map each other, found "
                << (result == cudaSuccess ? std::to_string(devices)
                                          : std::string(cudaGetErrorString(result)))
                << "\n";
      std::cout.flush();
      std::_Exit(77);
    }
  }
};
BOOST_TEST_GLOBAL_FIXTURE(Start);

}  // namespace

void require(bool ok, const std::string& what) {
  if (!ok) {
    throw std::runtime_error(what);
  }
}

std::string word(const std::string& text, std::size_t n) {
  std::size_t begin = 0;
  for (; n > 0; --n) {
    begin = text.find(' ', begin) + 1;
  }
  return text.substr(begin, text.find(' ', begin) - begin);
}

std::unique_ptr<Transport> make(const Options& options, const std::string& name) {
  return builtin_registries().transports.create(name, {options});
}

int select_device(Rank rank) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count devices");
  const int device = static_cast<int>(rank % devices);
  check(cudaSetDevice(device), "select the device");
  return device;
}

std::vector<std::string> run_threads(Rank count, const std::function<void(Group&)>& body) {
  auto groups = make_thread_groups(count);
  std::vector<std::string> failures(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*groups[rank]);
      } catch (const std::exception& error) {
        failures[rank] = error.what();
      }
      groups[rank].reset();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return failures;
}

void none_failed(const std::vector<std::string>& failures) {
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    BOOST_TEST(failures[rank].empty(), "rank " << rank << ": " << failures[rank]);
  }
}

void ranks_succeed(Rank count, const std::string& body, const std::string& argument, bool apart) {
  auto ranks = testing::start_ranks(count, body, argument, apart);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(100));
  for (std::size_t i = 0; i < ends.size(); ++i) {
    BOOST_TEST(ends[i].status == 0,
               "rank " << i << " ended with " << ends[i].status << ": " << ends[i].error);
  }
}

OnDevice::OnDevice(const Bytes& bytes, std::uint64_t shift) : bytes_(bytes.size()), shift_(shift) {
  check(cudaGetDevice(&device_), "read the current device");
  memory_ = DeviceMemory(bytes_ + shift + 1);
  write(bytes);
}

void OnDevice::write(const Bytes& bytes) {
  check(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "upload");
  check(cudaDeviceSynchronize(), "upload");
}

Bytes OnDevice::read() const {
  Bytes out(bytes_);
  check(cudaMemcpy(out.data(), data(), bytes_, cudaMemcpyDeviceToHost), "download");
  return out;
}

LocalBuffer OnDevice::buffer() const { return {data(), bytes_, MemorySpace::device, device_}; }

Simple Simple::make(Index elements, Rank ranks) {
  const auto one = std::make_shared<const Layout>(
      Layout::sharded({elements}, DType::i64, Mesh({1}, 0), {Placement::replicate()}));
  const auto rest = std::make_shared<const Layout>(
      Layout::sharded({elements}, DType::i64, Mesh({ranks - 1}, 1), {Placement::replicate()}));
  Problem problem = Problem::make({{"w", {elements}, {one, {"w"}}, {rest, {"w"}}, false}});
  Plan plan = builtin_registries()
                  .planners.create("direct", {})
                  ->plan(problem, Topology::single_island(ranks));
  return {std::move(problem), std::move(plan), elements};
}

Buffers Simple::buffers(Rank rank, const LocalBuffer& buffer) {
  return rank == 0 ? Buffers{{buffer}, {{}}} : Buffers{{{}}, {buffer}};
}

Bytes numbers(Index elements, std::int64_t first) {
  Bytes bytes(static_cast<std::size_t>(elements) * 8);
  for (Index i = 0; i < elements; ++i) {
    const std::int64_t value = first + i;
    std::memcpy(bytes.data() + i * 8, &value, 8);
  }
  return bytes;
}

void simple_rounds(Group& group, const Simple& c, const Options& options, int rounds,
                   const std::string& name) {
  select_device(group.rank());
  const auto transport = make(options, name);
  transport->connect(group, soon());
  const bool source = group.rank() == 0;
  OnDevice memory(numbers(c.elements, source ? 1 : -1'000'000));
  const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                          Simple::buffers(group.rank(), memory.buffer()), soon());
  for (int round = 1; round <= rounds; ++round) {
    const Bytes fresh = numbers(c.elements, round * 1'000'000);
    if (source) {
      memory.write(fresh);
    }
    group.barrier("filled", soon());
    session->start(static_cast<std::uint64_t>(round), soon());
    session->wait(soon());
    require(memory.read() == fresh, "bytes of round " + std::to_string(round));
    group.barrier("read", soon());
  }
}

std::uint64_t memory_in_use() {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free_bytes, &total), "ask for free memory");
  return total - free_bytes;
}

}  // namespace m2n::nccl
