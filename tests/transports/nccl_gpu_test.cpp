// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The NCCL transport on GPUs: kernels against the host's rules, random problems over every path,
/// windows and large tensors. Needs two GPUs that map each other; exits 77 without them.

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>

#include "core/api/memory.hpp"
#include "core/api/scales.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/cast.hpp"
#include "tests/support/placed_problem.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/nccl_gpu.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl/kernels.hpp"
#include "transports/nccl/memory.hpp"
#include "transports/nccl/tables.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

using testing::Place;
using testing::PlacedProblem;
using testing::random_bytes;

constexpr std::byte kUntouched{0xCD};

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
  const testing::TestValues values(placed.problem);
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
                 values.source(place.parameter, place.flat));
    }
  }
  std::vector<LocalBuffer> source;
  for (Bytes& bytes : memory.source) {
    source.push_back({bytes.data(), bytes.size(), MemorySpace::host, 0});
  }
  compute_scales(placed.problem, rank, source);
  return memory;
}

std::vector<Bytes> expected(const PlacedProblem& placed, Rank rank) {
  const testing::TestValues values(placed.problem);
  std::vector<Bytes> out = allocate(placed.problem, Role::destination, rank);
  for (const auto& [key, places] : placed.truth.destination) {
    if (key.first != rank) {
      continue;
    }
    const std::size_t buffer = number_of(placed.problem.buffers(Role::destination), key.second);
    for (const Place& place : places) {
      const Parameter& p = placed.problem.parameters()[place.parameter];
      write_bits(out[buffer].data() + place.offset_bytes, p.destination_dtype(),
                 values.destination(place.parameter, place.flat));
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
  select_device(group.rank());
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
      return devices_memory.back().buffer();
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

// ------------------------------------------------------------------------ bodies of processes

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
  const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                          Simple::buffers(group.rank(), buffer), soon());
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

const RankBodyEntry kProperty("property", property_body);
const RankBodyEntry kWindow("window", window_body);

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_gpu)

BOOST_AUTO_TEST_CASE(the_list_kernel_writes_what_a_host_copy_writes_at_any_alignment) {
  std::mt19937_64 random(3);
  check(cudaSetDevice(0), "select a device");
  ListRunner runner;
  std::vector<std::pair<DType, DType>> types = testing::kCopyTypes;
  types.insert(types.end(), testing::kQuantisedTypes.begin(), testing::kQuantisedTypes.end());
  for (int i = 0; i < 800; ++i) {
    const auto [from, to] = types[static_cast<std::size_t>(i) % types.size()];
    const auto c = testing::random_copy(random, from, to, i % 5 == 0 ? 60 : 12);
    const Bytes source = random_bytes(c.source_bytes, random);
    Bytes expected_bytes = random_bytes(c.destination_bytes, random);
    const OnDevice device_source(source);
    const OnDevice device_scales(c.scales);
    const OnDevice device_target(expected_bytes);
    copy_region(c.copy, source.data() + c.source_offset,
                expected_bytes.data() + c.destination_offset, false, c.first_scale());
    runner.run({{c.copy, at(device_source.data()) + c.source_offset,
                 at(device_target.data()) + c.destination_offset,
                 at(device_scales.data()) + c.scale_offset}});
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
                   at(device_target.data()),
                   0}});
      BOOST_TEST((device_target.read() == wanted),
                 to_string(from) << " to " << to_string(to) << " shifted by " << shift);
    }
  }
}

/// Each value under scales from below the normal numbers to NaN: as many rows of all values.
BOOST_AUTO_TEST_CASE(quantised_elements_have_the_bits_of_the_host_for_every_half_and_every_binade) {
  check(cudaSetDevice(0), "select a device");
  ListRunner runner;
  std::mt19937_64 random(5);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> scales = {1.0F,      0.37F,     1000.0F,
                                     0x1p-130F, kInfinity, std::numeric_limits<float>::quiet_NaN()};
  const auto rows = static_cast<Index>(scales.size());
  Bytes scale_bytes(scales.size() * sizeof(float));
  std::memcpy(scale_bytes.data(), scales.data(), scale_bytes.size());
  for (const auto& [from, to] : testing::kQuantisedTypes) {
    const std::size_t count = bytes_of(from) == 2 ? 65'536 : std::size_t{1} << 22;
    Bytes source(count * bytes_of(from));
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = bytes_of(from) == 2 ? i : (i << 10) | (random() & 0x3ff);
      std::memcpy(source.data() + i * bytes_of(from), &bits, bytes_of(from));
    }
    const auto columns = static_cast<Index>(count);
    const StridedCopy copy{{rows, columns}, {0, 1}, {columns, 1}, from, to, {1, 0}};
    Bytes wanted(count * scales.size());
    copy_region(copy, source.data(), wanted.data(), false, scale_bytes.data());
    for (const std::uint64_t shift : {0U, 2U}) {
      const OnDevice device_source(source, shift);
      const OnDevice device_scales(scale_bytes, shift);
      const OnDevice device_target(Bytes(wanted.size()), shift);
      runner.run({{simplify(copy), at(device_source.data()), at(device_target.data()),
                   at(device_scales.data())}});
      BOOST_TEST((device_target.read() == wanted), to_string(from) << " shifted by " << shift);
    }
  }
}

/// Boxes of stacked experts with blocks that are cut short, in views of every kind.
BOOST_AUTO_TEST_CASE(scales_and_quantised_digests_on_a_device_are_those_of_the_host) {
  check(cudaSetDevice(0), "select a device");
  std::mt19937_64 random(6);
  provide_cuda_memory();
  const Memory& memory = memory_of(MemorySpace::device);
  struct View {
    Shape shape;
    Dims blocks;
    Strides strides;
  };
  const std::vector<View> views = {{{300, 512}, {128, 128}, {512, 1}},
                                   {{300, 500}, {128, 128}, {504, 1}},
                                   {{3, 200, 136}, {1, 128, 128}, {200 * 136, 136, 1}},
                                   {{200, 130}, {128, 128}, {1, 203}},
                                   {{7, 9}, {2, 4}, {9, 1}},
                                   {{5}, {3}, {2}},
                                   {{}, {}, {}},
                                   {{40, 24}, {1, 1}, {24, 1}},
                                   {{4, 3000}, {4, 3000}, {3000, 1}}};
  for (const View& view : views) {
    for (const auto& [from, to] : testing::kQuantisedTypes) {
      for (const std::uint64_t shift : {0U, 3U}) {
        const std::uint64_t item = bytes_of(from);
        const Box box = Box::whole(view.shape);
        const std::uint64_t bytes = byte_span(view.shape, {0, 0, view.strides}, item).end;
        Bytes source(bytes);
        for (std::uint64_t at = 0; at < bytes / item; ++at) {
          const std::uint64_t bits = at % 11 == 0 ? 0 : synthetic_bits(from, random(), at);
          std::memcpy(source.data() + at * item, &bits, item);
        }
        const Shape grid = scale_shape(view.shape, view.blocks);
        const Strides compact = row_major(grid);
        Bytes wanted(static_cast<std::uint64_t>(element_count(grid)) * sizeof(float));
        block_scales(box, view.blocks, from, source.data(), view.strides, wanted.data(), compact);
        const OnDevice device_source(source, shift);
        const OnDevice device_scales(Bytes(wanted.size()), shift);
        const ScalesOf one{{view.shape, box, from, device_source.buffer(), view.strides},
                           {view.blocks, device_scales.buffer(), compact}};
        const ScalesOf both[] = {one, one};
        memory.block_scales(both);
        const std::string what = to_string(view.shape) + " of " + std::string(to_string(from));
        BOOST_TEST((device_scales.read() == wanted), what);
        const DigestOf here{one.placed, to, one.scales};
        const DigestOf there{
            {view.shape, box, from, host_buffer(source.data(), bytes), view.strides},
            to,
            {view.blocks, host_buffer(wanted.data(), wanted.size()), compact}};
        BOOST_TEST(digests({&here, 1}).front() == digests({&there, 1}).front(), what);
      }
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
      const auto session = transport->prepare(make_program(plan, problem, group.rank()),
                                              Simple::buffers(group.rank(), buffer), soon());
      session->start(1, soon());
      session->wait(soon());
      digests[device] = device_digest_of_box({kElements}, Box::whole({kElements}), DType::bf16,
                                             memory.data(), {1});
      group.barrier("read", soon());
    }));
    BOOST_TEST(digests[0] == digests[1]);
  }
}

BOOST_AUTO_TEST_CASE(memory_of_another_device_is_refused_by_name) {
  const Simple c = Simple::make(10, 2);
  const auto failures = run_threads(2, [&](Group& group) {
    check(cudaSetDevice(1), "select the device");
    OnDevice memory(numbers(10, 0));
    const auto transport = make({});
    transport->connect(group, soon());
    transport->prepare(make_program(c.plan, c.problem, group.rank()),
                       Simple::buffers(group.rank(), memory.buffer()), soon());
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
