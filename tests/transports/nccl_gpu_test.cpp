// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The NCCL transport on GPUs: kernels against the host's rules, random problems over every path,
/// and what goes wrong. Needs two GPUs that map each other; exits 77 without them.

#include <signal.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <set>
#include <thread>

#include "core/api/builtin.hpp"
#include "core/rendezvous/thread_group.hpp"
#include "core/tensor/cast.hpp"
#include "tests/support/placed_problem.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/nccl_random_copy.hpp"
#include "tests/transports/nccl_world.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl/session.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

using testing::Bytes;
using testing::Place;
using testing::PlacedProblem;
using testing::random_bytes;

constexpr std::chrono::seconds kDeadline{60};
constexpr std::byte kUntouched{0xCD};

Deadline soon() { return deadline_in(kDeadline); }

void require(bool ok, const std::string& what) {
  if (!ok) {
    throw std::runtime_error(what);
  }
}

std::unique_ptr<Transport> make(const Options& options) {
  return builtin_registries().transports.create("nccl", {options});
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

/// Device memory with the same offset inside 16 bytes as nothing in particular: any alignment.
class OnDevice {
 public:
  OnDevice() = default;
  OnDevice(const Bytes& bytes, std::uint64_t shift = 0) : bytes_(bytes.size()), shift_(shift) {
    memory_ = DeviceMemory(bytes_ + shift + 1);
    check(cudaMemcpy(data(), bytes.data(), bytes_, cudaMemcpyHostToDevice), "upload");
    check(cudaDeviceSynchronize(), "upload");
  }
  std::byte* data() const { return memory_.data() + shift_; }
  Bytes read() const {
    Bytes out(bytes_);
    check(cudaMemcpy(out.data(), data(), bytes_, cudaMemcpyDeviceToHost), "download");
    return out;
  }

 private:
  DeviceMemory memory_;
  std::uint64_t bytes_ = 0;
  std::uint64_t shift_ = 0;
};

/// Runs lists on the current device, without a session.
class ListRunner {
 public:
  ListRunner() : head_(4096) {
    void* words = nullptr;
    check(cudaHostAlloc(&words, sizeof(HostWords), cudaHostAllocMapped), "pinned memory");
    words_ = new (words) HostWords{};
    control_.head = reinterpret_cast<ControlHead*>(head_.data());
    control_.flags = reinterpret_cast<volatile std::uint64_t*>(head_.data() + sizeof(ControlHead));
    control_.host = words_;
  }
  ~ListRunner() { cudaFreeHost(words_); }

  void run(const std::vector<Placed>& regions) {
    Tables tables;
    const ListSlice slice = append_list(regions, tables);
    if (slice.count == 0) {
      return;
    }
    DeviceMemory tasks(tables.tasks.size() * sizeof(Task));
    DeviceMemory loops(tables.loops.size() * sizeof(Loop));
    check(cudaMemcpy(tasks.data(), tables.tasks.data(), tasks.bytes(), cudaMemcpyHostToDevice),
          "upload");
    if (loops.bytes() > 0) {
      check(cudaMemcpy(loops.data(), tables.loops.data(), loops.bytes(), cudaMemcpyHostToDevice),
            "upload");
    }
    launch_list(
        control_,
        {reinterpret_cast<const Task*>(tasks.data()), reinterpret_cast<const Loop*>(loops.data())},
        slice, {}, {}, 132, cudaStreamLegacy);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "run a list");
  }

 private:
  DeviceMemory head_;
  HostWords* words_ = nullptr;
  Control control_;
};

std::uint64_t at(const std::byte* data) { return reinterpret_cast<std::uint64_t>(data); }

// ------------------------------------------------------------------------ random problems

struct RankMemory {
  std::vector<Bytes> source;
  std::vector<Bytes> destination;
};

void write_bits(std::byte* to, DType dtype, std::uint64_t bits) {
  std::memcpy(to, &bits, bytes_of(dtype));
}

std::uint64_t cast_bits(DType from, DType to, std::uint64_t bits) {
  std::uint64_t out = 0;
  cast_elements(from, reinterpret_cast<const std::byte*>(&bits), to,
                reinterpret_cast<std::byte*>(&out), 1);
  return out;
}

std::vector<Bytes> allocate(const Problem& problem, Role role, Rank rank) {
  std::vector<Bytes> buffers;
  for (const std::uint64_t bytes : problem.buffer_bytes(role, rank)) {
    buffers.emplace_back(bytes, kUntouched);
  }
  return buffers;
}

std::size_t number_of(const BufferTable& table, const std::string& name) {
  return static_cast<std::size_t>(std::find(table.names.begin(), table.names.end(), name) -
                                  table.names.begin());
}

RankMemory filled(const PlacedProblem& placed, Rank rank) {
  RankMemory memory{allocate(placed.problem, Role::source, rank),
                    allocate(placed.problem, Role::destination, rank)};
  for (const auto& [key, places] : placed.truth.source) {
    if (key.first != rank) {
      continue;
    }
    const std::size_t buffer = number_of(placed.problem.buffers(Role::source), key.second);
    for (const Place& place : places) {
      const DType dtype = placed.problem.parameters()[place.parameter].source_dtype();
      write_bits(memory.source[buffer].data() + place.offset_bytes, dtype,
                 testing::test_bits(dtype, place.parameter, place.flat));
    }
  }
  return memory;
}

std::vector<Bytes> expected(const PlacedProblem& placed, Rank rank) {
  std::vector<Bytes> out = allocate(placed.problem, Role::destination, rank);
  for (const auto& [key, places] : placed.truth.destination) {
    if (key.first != rank) {
      continue;
    }
    const std::size_t buffer = number_of(placed.problem.buffers(Role::destination), key.second);
    for (const Place& place : places) {
      const Parameter& p = placed.problem.parameters()[place.parameter];
      write_bits(out[buffer].data() + place.offset_bytes, p.destination_dtype(),
                 cast_bits(p.source_dtype(), p.destination_dtype(),
                           testing::test_bits(p.source_dtype(), place.parameter, place.flat)));
    }
  }
  return out;
}

/// Moves random problems seed, seed + 1, ... with every planner in turn. Odd ones lie in host
/// memory, even ones in device memory at odd addresses. Throws what is wrong.
void move_random_problems(Group& group, const Options& options, std::uint64_t seed,
                          std::uint64_t cases, std::set<std::string>& paths) {
  const Registries registries = builtin_registries();
  std::vector<std::string> planners;
  for (const auto& entry : registries.planners.entries()) {
    planners.push_back(entry.first);
  }
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count devices");
  const int device = static_cast<int>(group.rank() % devices);
  check(cudaSetDevice(device), "select the device");
  const auto transport = make(options);
  transport->connect(group, soon());
  for (std::uint64_t i = 0; i < cases; ++i) {
    const std::string where = "case M2N_TEST_SEED=" + std::to_string(seed + i);
    std::mt19937_64 random(seed + i);
    testing::PlacedLimits limits;
    limits.ranks = group.size();
    const PlacedProblem placed = testing::placed_problem(random, limits);
    const Plan plan = registries.planners.create(planners[i % planners.size()], {})
                          ->plan(placed.problem, Topology::single_island(group.size()));
    RankMemory memory = filled(placed, group.rank());
    Buffers buffers;
    std::vector<OnDevice> devices_memory;
    devices_memory.reserve(memory.source.size() + memory.destination.size());
    const auto lend = [&](Bytes& bytes) {
      if (bytes.empty()) {
        return LocalBuffer{};
      }
      if (i % 2 == 1) {
        return LocalBuffer{bytes.data(), bytes.size(), MemorySpace::host, 0};
      }
      devices_memory.emplace_back(bytes, random() % 16);
      return LocalBuffer{devices_memory.back().data(), bytes.size(), MemorySpace::device, device};
    };
    for (Bytes& bytes : memory.source) {
      buffers.source.push_back(lend(bytes));
    }
    const std::size_t sources = devices_memory.size();
    for (Bytes& bytes : memory.destination) {
      buffers.destination.push_back(lend(bytes));
    }
    Program program = make_program(plan, placed.problem, group.rank());
    program.world_size = group.size();
    const auto session = transport->prepare(program, buffers, soon());
    for (std::uint64_t round = 1; round <= 2; ++round) {
      session->start(round, soon());
      for (const PeerTraffic& peer : session->wait(soon()).peers) {
        paths.insert(peer.path);
      }
    }
    if (i % 2 == 0) {
      std::size_t next = sources;
      for (Bytes& bytes : memory.destination) {
        if (!bytes.empty()) {
          bytes = devices_memory[next++].read();
        }
      }
    }
    require(memory.destination == expected(placed, group.rank()), where + ": bytes differ");
    group.barrier("checked", soon());
  }
}

// ------------------------------------------------------------------------ one tensor

/// One tensor of i64 from rank 0 to the last rank, and with more ranks also to those between.
struct Simple {
  Problem problem;
  Plan plan;
  Index elements;

  static Simple make(Index elements, Rank ranks) {
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
};

Bytes numbers(Index elements, std::int64_t first) {
  Bytes bytes(static_cast<std::size_t>(elements) * 8);
  for (Index i = 0; i < elements; ++i) {
    const std::int64_t value = first + i;
    std::memcpy(bytes.data() + i * 8, &value, 8);
  }
  return bytes;
}

/// Rounds of @p c with changing values on the calling rank. Throws when bytes differ.
void simple_rounds(Group& group, const Simple& c, const Options& options, int rounds,
                   std::string* path = nullptr) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "count devices");
  const int device = static_cast<int>(group.rank() % devices);
  check(cudaSetDevice(device), "select the device");
  const auto transport = make(options);
  transport->connect(group, soon());
  const bool source = group.rank() == 0;
  OnDevice memory(numbers(c.elements, source ? 1 : -1'000'000));
  const LocalBuffer buffer{memory.data(), static_cast<std::uint64_t>(c.elements) * 8,
                           MemorySpace::device, device};
  Buffers buffers{{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}};
  const auto session =
      transport->prepare(make_program(c.plan, c.problem, group.rank()), buffers, soon());
  for (int round = 1; round <= rounds; ++round) {
    if (source) {
      const Bytes fresh = numbers(c.elements, round * 1'000'000);
      check(cudaMemcpy(memory.data(), fresh.data(), fresh.size(), cudaMemcpyHostToDevice), "fill");
    }
    group.barrier("filled", soon());
    session->start(static_cast<std::uint64_t>(round), soon());
    const RoundReport report = session->wait(soon());
    if (path != nullptr && !report.peers.empty()) {
      *path = report.peers[0].path;
    }
    require(memory.read() == numbers(c.elements, round * 1'000'000),
            "bytes of round " + std::to_string(round));
    group.barrier("read", soon());
  }
}

// ------------------------------------------------------------------------ bodies of processes

std::string word(const std::string& text, std::size_t n) {
  std::size_t begin = 0;
  for (; n > 0; --n) {
    begin = text.find(' ', begin) + 1;
  }
  return text.substr(begin, text.find(' ', begin) - begin);
}

/// "auto 7 40 ipc,local": path, seed, cases, and paths that may be seen.
void property_body(Group& group, const std::string& argument) {
  std::set<std::string> paths;
  move_random_problems(group, {{"path", word(argument, 0)}}, std::stoull(word(argument, 1)),
                       std::stoull(word(argument, 2)), paths);
  for (const std::string& path : paths) {
    const std::string allowed = word(argument, 3);
    std::size_t begin = 0;
    while (begin < path.size()) {
      const std::size_t end = std::min(path.find('+', begin), path.size());
      require(allowed.find(path.substr(begin, end - begin)) != std::string::npos,
              "path " + path + ", expected " + allowed);
      begin = end + 1;
    }
  }
}

/// Every rank's arena has one size, and is registered as a window.
void window_body(Group& group, const std::string&) {
  constexpr Index kElements = 3'000'017;
  const Simple c = Simple::make(kElements, group.size());
  const int device = group.rank();
  check(cudaSetDevice(device), "select the device");
  DeviceArena arena(device, 32 << 20);
  arena.take(48);
  const LocalBuffer buffer = arena.take(kElements * 8);
  const bool source = group.rank() == 0;
  const auto transport = make({{"path", "window"}});
  transport->connect(group, soon());
  const auto session = transport->prepare(
      make_program(c.plan, c.problem, group.rank()),
      {{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}}, soon());
  for (int round = 1; round <= 3; ++round) {
    const Bytes fresh = numbers(kElements, source ? round * 10 : 0);
    check(cudaMemcpy(buffer.data, fresh.data(), fresh.size(), cudaMemcpyHostToDevice), "fill");
    group.barrier("filled", soon());
    session->start(static_cast<std::uint64_t>(round), soon());
    const RoundReport report = session->wait(soon());
    require(report.peers.at(0).path == "window", "path is " + report.peers[0].path);
    Bytes got(fresh.size());
    check(cudaMemcpy(got.data(), buffer.data, got.size(), cudaMemcpyDeviceToHost), "read");
    require(got == numbers(kElements, round * 10), "bytes of a window");
    group.barrier("read", soon());
  }
}

/// One allocation of 2 MiB, tensors at 0, 64 B, 16 KiB and 128 KiB in it, on both sides.
void offsets_body(Group& group, const std::string&) {
  const std::vector<std::uint64_t> offsets = {0, 64, 16 << 10, 128 << 10};
  const auto one = std::make_shared<const Layout>(
      Layout::sharded({5}, DType::i64, Mesh({1}, 0), {Placement::replicate()}));
  const auto two = std::make_shared<const Layout>(
      Layout::sharded({5}, DType::i64, Mesh({1}, 1), {Placement::replicate()}));
  std::vector<Parameter> parameters;
  for (const std::uint64_t offset : offsets) {
    const std::string name = "at " + std::to_string(offset);
    parameters.push_back({name, {5}, {one, {name}}, {two, {name}}, false});
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(2));
  const int device = group.rank();
  check(cudaSetDevice(device), "select the device");
  DeviceMemory before(777);  // small allocations share a block
  DeviceMemory memory(2 << 20);
  Buffers buffers{std::vector<LocalBuffer>(4), std::vector<LocalBuffer>(4)};
  for (std::size_t i = 0; i < 4; ++i) {
    auto& side = group.rank() == 0 ? buffers.source : buffers.destination;
    side[i] = {memory.data() + offsets[i], 40, MemorySpace::device, device};
    if (group.rank() == 0) {
      const Bytes values = numbers(5, static_cast<std::int64_t>(i) * 100);
      check(cudaMemcpy(side[i].data, values.data(), 40, cudaMemcpyHostToDevice), "fill");
    }
  }
  const auto transport = make({{"path", "ipc"}});
  transport->connect(group, soon());
  const auto session =
      transport->prepare(make_program(plan, problem, group.rank()), buffers, soon());
  session->start(1, soon());
  require(session->wait(soon()).peers.at(0).path == "ipc", "the path is ipc");
  if (group.rank() == 1) {
    for (std::size_t i = 0; i < 4; ++i) {
      Bytes got(40);
      check(cudaMemcpy(got.data(), memory.data() + offsets[i], 40, cudaMemcpyDeviceToHost), "read");
      require(got == numbers(5, static_cast<std::int64_t>(i) * 100),
              "tensor at " + std::to_string(offsets[i]));
    }
  }
  group.barrier("read", soon());
}

std::uint64_t memory_in_use() {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free_bytes, &total), "ask for free memory");
  return total - free_bytes;
}

/// Fifty sessions over IPC leave no memory behind.
void leak_body(Group& group, const std::string&) {
  const Simple c = Simple::make(1 << 20, group.size());
  std::uint64_t first = 0;
  for (int i = 0; i < 50; ++i) {
    simple_rounds(group, c, {{"path", "ipc"}}, 1);
    group.barrier("over", soon());
    if (i == 2) {
      first = memory_in_use();
    }
    group.barrier("measured", soon());
  }
  require(memory_in_use() <= first + (8 << 20),
          "memory grew by " + std::to_string(memory_in_use() - first));
  group.barrier("end", soon());
}

/// Rank 1 is killed or stops in the middle of a round; the others must be out by the deadline, and
/// run a new epoch without it. @p argument  "wire kill", "ipc stop", ...
void fault_body(Group& group, const std::string& argument) {
  const Simple c = Simple::make(1 << 24, 3);  // more than sockets hold back
  const Options options = {{"path", word(argument, 0)}};
  const int device = group.rank() % 2;
  check(cudaSetDevice(device), "select the device");
  {
    const auto transport = make(options);
    transport->connect(group, soon());
    OnDevice memory(numbers(c.elements, 1));
    const LocalBuffer buffer{memory.data(), static_cast<std::uint64_t>(c.elements) * 8,
                             MemorySpace::device, device};
    const bool source = group.rank() == 0;
    const auto session = transport->prepare(
        make_program(c.plan, c.problem, group.rank()),
        {{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}}, soon());
    session->start(1, soon());
    session->wait(soon());
    group.barrier("first round", soon());
    if (group.rank() == 1) {
      kill(getpid(), word(argument, 1) == "kill" ? SIGKILL : SIGSTOP);
    }
    const auto begin = std::chrono::steady_clock::now();
    std::string text;
    try {
      session->start(2, deadline_in(std::chrono::seconds(3)));
      session->wait(deadline_in(std::chrono::seconds(3)));
      require(!source, "the round cannot be complete");
    } catch (const TransportError& error) {
      text = error.what();
      require(error.code() == Errc::timed_out || error.code() == Errc::peer_lost, text);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    require(took < std::chrono::seconds(12), "out after " + std::to_string(took.count()) + " s");
    if (source) {
      require(text.find('1') != std::string::npos, "rank 1 is named: " + text);
    }
  }
  // Ranks 0 and 2 go on as ranks 0 and 1.
  const auto rest = testing::second_group(group.rank() / 2, 2);
  simple_rounds(*rest, Simple::make(100'000, 2), options, 2);
}

// ------------------------------------------------------------------------ fixtures

struct Start {
  Start() {
    testing::rank_bodies() = {{"property", property_body},
                              {"window", window_body},
                              {"offsets", offsets_body},
                              {"leak", leak_body},
                              {"fault", fault_body}};
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

void ranks_succeed(Rank count, const std::string& body, const std::string& argument, bool apart) {
  auto ranks = testing::start_ranks(count, body, argument, apart);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(100));
  for (std::size_t i = 0; i < ends.size(); ++i) {
    BOOST_TEST(ends[i].status == 0,
               "rank " << i << " ended with " << ends[i].status << ": " << ends[i].error);
  }
}

BOOST_TEST_GLOBAL_FIXTURE(Start);

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_gpu)

BOOST_AUTO_TEST_CASE(the_list_kernel_writes_what_a_host_copy_writes_at_any_alignment) {
  std::mt19937_64 random(3);
  check(cudaSetDevice(0), "select a device");
  ListRunner runner;
  for (int i = 0; i < 600; ++i) {
    const auto [from, to] =
        testing::kCopyTypes[static_cast<std::size_t>(i) % testing::kCopyTypes.size()];
    const auto c = testing::random_copy(random, from, to, i % 5 == 0 ? 60 : 12);
    const Bytes source = random_bytes(c.source_bytes, random);
    Bytes expected_bytes = random_bytes(c.destination_bytes, random);
    const OnDevice device_source(source);
    const OnDevice device_target(expected_bytes);
    copy_region(c.copy, source.data() + c.source_offset,
                expected_bytes.data() + c.destination_offset);
    runner.run({{c.copy, at(device_source.data()) + c.source_offset,
                 at(device_target.data()) + c.destination_offset}});
    BOOST_TEST_REQUIRE((device_target.read() == expected_bytes), "copy " << i);
  }
}

BOOST_AUTO_TEST_CASE(casts_have_the_bits_of_the_host_for_every_half_and_every_binade) {
  check(cudaSetDevice(0), "select a device");
  ListRunner runner;
  std::mt19937_64 random(4);
  for (const auto& [from, to] : testing::kCopyTypes) {
    if (from == to) {
      continue;
    }
    const std::size_t count = bytes_of(from) == 2 ? 65'536 : std::size_t{1} << 23;
    Bytes source(count * bytes_of(from));
    for (std::size_t i = 0; i < count; ++i) {  // f32: the top 23 bits in order, the rest random
      const std::uint64_t bits = bytes_of(from) == 2 ? i : (i << 9) | (random() & 0x1ff);
      std::memcpy(source.data() + i * bytes_of(from), &bits, bytes_of(from));
    }
    Bytes wanted(count * bytes_of(to));
    cast_elements(from, source.data(), to, wanted.data(), count);
    for (const std::uint64_t shift : {0U, 6U}) {
      const OnDevice device_source(source, shift);
      const OnDevice device_target(Bytes(wanted.size()), shift);
      runner.run({{{{static_cast<Index>(count)}, {1}, {1}, from, to},
                   at(device_source.data()),
                   at(device_target.data())}});
      BOOST_TEST((device_target.read() == wanted),
                 to_string(from) << " to " << to_string(to) << " shifted by " << shift);
    }
  }
}

BOOST_AUTO_TEST_CASE(values_and_digests_are_those_of_the_host_for_every_type) {
  check(cudaSetDevice(0), "select a device");
  const Shape shape = {5, 7, 33};
  const Box box = {{1, 0, 3}, {5, 6, 30}};
  const Strides strides = {400, 1, 12};
  for (const DType dtype : all_dtypes()) {
    if (!is_byte_sized(dtype)) {
      continue;
    }
    Bytes host(4000 * bytes_of(dtype), kUntouched);
    const OnDevice device(host, 3);
    fill_synthetic(shape, box, dtype, 99, host.data(), strides);
    device_fill_synthetic(shape, box, dtype, 99, device.data(), strides);
    BOOST_TEST((device.read() == host), to_string(dtype));
    BOOST_TEST(device_digest_of_box(shape, box, dtype, device.data(), strides) ==
               digest_of_box(shape, box, dtype, host.data(), strides));
  }
}

BOOST_AUTO_TEST_CASE(random_problems_between_threads_arrive_byte_for_byte) {
  const std::uint64_t seed = testing::test_seed();
  std::mutex mutex;
  std::set<std::string> paths;
  none_failed(run_threads(8, [&](Group& group) {
    std::set<std::string> mine;
    move_random_problems(group, {}, seed, 150, mine);
    const std::lock_guard lock(mutex);
    paths.insert(mine.begin(), mine.end());
  }));
  BOOST_TEST(paths.contains("peer"));
  BOOST_TEST(!paths.contains("wire"));
}

BOOST_AUTO_TEST_CASE(random_problems_between_processes_arrive_over_ipc) {
  ranks_succeed(8, "property", "auto " + std::to_string(testing::test_seed()) + " 40 ipc,local",
                false);
}

BOOST_AUTO_TEST_CASE(random_problems_arrive_over_the_wire_with_4_and_4_ranks) {
  ranks_succeed(8, "property", "wire " + std::to_string(testing::test_seed()) + " 30 wire", true);
}

BOOST_AUTO_TEST_CASE(random_problems_arrive_over_the_wire_with_8_and_4_ranks) {
  ranks_succeed(12, "property", "wire " + std::to_string(testing::test_seed()) + " 20 wire", true);
}

BOOST_AUTO_TEST_CASE(arenas_of_two_processes_become_windows) {
  ranks_succeed(2, "window", "-", false);
}

BOOST_AUTO_TEST_CASE(tensors_inside_one_allocation_are_found_by_their_offsets) {
  ranks_succeed(2, "offsets", "-", false);
}

BOOST_AUTO_TEST_CASE(fifty_sessions_leave_no_device_memory_behind) {
  ranks_succeed(2, "leak", "-", false);
}

// C13
BOOST_AUTO_TEST_CASE(a_rank_killed_or_stopped_in_a_round_lets_the_others_out_and_start_anew) {
  for (const char* argument : {"ipc kill", "ipc stop", "wire kill", "wire stop"}) {
    auto ranks = testing::start_ranks(3, "fault", argument, true);
    const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(25));
    BOOST_TEST(ends[1].status == -SIGKILL);
    for (const std::size_t i : {std::size_t{0}, std::size_t{2}}) {
      BOOST_TEST(ends[i].status == 0, argument << ": rank " << i << " ended with " << ends[i].status
                                               << " after " << ends[i].seconds
                                               << " s: " << ends[i].error);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_replayed_graph_moves_the_values_of_now) {
  for (const char* graph : {"on", "off"}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(20'000'003, 2), {{"graph", graph}}, 4);
    }));
  }
}

BOOST_AUTO_TEST_CASE(nothing_to_move_is_a_round_too) {
  for (const char* path : {"auto", "wire"}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(0, 2), {{"path", path}}, 2);
    }));
  }
}

BOOST_AUTO_TEST_CASE(a_tensor_above_4_gib_arrives_whole) {
  constexpr Index kElements = (Index{5} << 30) / 2 + 12'345;
  const auto one = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::bf16, Mesh({1}, 0), {Placement::replicate()}));
  const auto two = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::bf16, Mesh({1}, 1), {Placement::replicate()}));
  const Problem problem = Problem::make({{"w", {kElements}, {one, {"w"}}, {two, {"w"}}, false}});
  const Plan plan =
      builtin_registries().planners.create("direct", {})->plan(problem, Topology::single_island(2));
  for (const Options& options :
       {Options{}, Options{{"path", "wire"}}, Options{{"engine_max_copies", "0"}}}) {
    std::uint64_t digests[2] = {0, 1};
    none_failed(run_threads(2, [&](Group& group) {
      const int device = group.rank();
      check(cudaSetDevice(device), "select the device");
      DeviceMemory memory(kElements * 2);
      if (device == 0) {
        device_fill_synthetic({kElements}, Box::whole({kElements}), DType::bf16, 8, memory.data(),
                              {1});
      }
      const LocalBuffer buffer{memory.data(), memory.bytes(), MemorySpace::device, device};
      const auto transport = make(options);
      transport->connect(group, soon());
      const auto session = transport->prepare(
          make_program(plan, problem, group.rank()),
          {{device == 0 ? buffer : LocalBuffer{}}, {device == 0 ? LocalBuffer{} : buffer}}, soon());
      session->start(1, soon());
      session->wait(soon());
      digests[device] = device_digest_of_box({kElements}, Box::whole({kElements}), DType::bf16,
                                             memory.data(), {1});
      group.barrier("read", soon());
    }));
    BOOST_TEST(digests[0] == digests[1]);
  }
}

BOOST_AUTO_TEST_CASE(a_round_sees_what_the_callers_stream_had_still_to_write) {
  constexpr Index kElements = 1 << 16;
  const Simple c = Simple::make(kElements, 2);
  none_failed(run_threads(2, [&](Group& group) {
    const int device = group.rank();
    check(cudaSetDevice(device), "select the device");
    cudaStream_t producer = nullptr;
    check(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking), "create a stream");
    DeviceMemory delay(std::uint64_t{2} << 30);
    OnDevice memory(numbers(kElements, 0));
    const LocalBuffer buffer{memory.data(), kElements * 8, MemorySpace::device, device};
    const bool source = device == 0;
    const auto transport =
        make({{"stream", std::to_string(reinterpret_cast<std::uint64_t>(producer))}});
    transport->connect(group, soon());
    const auto session = transport->prepare(
        make_program(c.plan, c.problem, group.rank()),
        {{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}}, soon());
    for (int round = 1; round <= 100; ++round) {
      if (source) {
        for (int i = 0; i < 3; ++i) {
          check(cudaMemsetAsync(delay.data(), i, delay.bytes(), producer), "delay");
        }
        check(cudaMemsetAsync(memory.data(), round, kElements * 8, producer), "produce");
      }
      session->start(static_cast<std::uint64_t>(round), soon());
      session->wait(soon());
      if (!source) {
        require(memory.read() == Bytes(kElements * 8, static_cast<std::byte>(round)),
                "round " + std::to_string(round) + " saw old values");
      }
      group.barrier("read", soon());
    }
    cudaStreamDestroy(producer);
  }));
}

BOOST_AUTO_TEST_CASE(memory_of_another_device_is_refused_by_name) {
  const Simple c = Simple::make(10, 2);
  const auto failures = run_threads(2, [&](Group& group) {
    check(cudaSetDevice(1), "select the device");
    OnDevice memory(numbers(10, 0));
    const LocalBuffer buffer{memory.data(), 80, MemorySpace::device, 1};
    const bool source = group.rank() == 0;
    const auto transport = make({});
    transport->connect(group, soon());
    transport->prepare(make_program(c.plan, c.problem, group.rank()),
                       {{source ? buffer : LocalBuffer{}}, {source ? LocalBuffer{} : buffer}},
                       soon());
  });
  for (const std::string& failure : failures) {
    BOOST_TEST(failure.find("rank 0") != std::string::npos, failure);
    BOOST_TEST(failure.find("device 1") != std::string::npos, failure);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl
