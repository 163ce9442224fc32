// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Faults that others have met when they moved weights between GPUs, one case each.

#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <fstream>
#include <numeric>

#include "core/tensor/cast.hpp"
#include "tests/transports/nccl_gpu.hpp"
#include "transports/nccl/session.hpp"
#include "transports/nccl/values.hpp"

namespace m2n::nccl {
namespace {

const std::vector<Options> kMapped = {{}, {{"engine_max_copies", "0"}}, {{"graph", "on"}}};
const std::vector<Options> kAllPaths = {
    {}, {{"engine_max_copies", "0"}}, {{"graph", "on"}}, {{"path", "wire"}}};

Plan direct_plan(const Problem& problem) {
  return builtin_registries()
      .planners.create("direct", {})
      ->plan(problem, Topology::single_island(problem.world_size()));
}

/// A parameter from rank 0, where it lies as @p strides say, to rank 1, where it is row-major.
Parameter strided(const std::string& name, const Shape& shape, const Strides& strides,
                  DType dtype) {
  const auto lie = [&](Rank rank, const Strides& s) {
    return std::make_shared<const Layout>(
        Layout::explicit_pieces(shape, dtype, {rank}, {{rank, {Box::whole(shape), {0, 0, s}}}}));
  };
  return {name, shape, {lie(0, strides), {name}}, {lie(1, row_major(shape)), {name}}, false};
}

/// One round of @p problem between two threads. @p sources  Rank 0's buffers. Rank 1's, after it.
std::vector<Bytes> moved(const Problem& problem, const std::vector<Bytes>& sources,
                         const Options& options) {
  const Plan plan = direct_plan(problem);
  std::vector<Bytes> results;
  none_failed(run_threads(2, [&](Group& group) {
    select_device(group.rank());
    std::vector<OnDevice> memory;
    Buffers buffers{std::vector<LocalBuffer>(problem.buffers(Role::source).names.size()),
                    std::vector<LocalBuffer>(problem.buffers(Role::destination).names.size())};
    if (group.rank() == 0) {
      for (std::size_t i = 0; i < sources.size(); ++i) {
        memory.emplace_back(sources[i]);
        buffers.source[i] = memory.back().buffer();
      }
    } else {
      const auto sizes = problem.buffer_bytes(Role::destination, 1);
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        memory.emplace_back(Bytes(sizes[i], std::byte{0xEE}));
        buffers.destination[i] = memory.back().buffer();
      }
    }
    const auto transport = make(options);
    transport->connect(group, soon());
    const auto session =
        transport->prepare(make_program(plan, problem, group.rank()), buffers, soon());
    session->start(1, soon());
    session->wait(soon());
    if (group.rank() == 1) {
      for (const OnDevice& m : memory) {
        results.push_back(m.read());
      }
    }
    group.barrier("read", soon());
  }));
  return results;
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0;
  std::uint64_t resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

/// One session of @p c on the calling thread's rank, its device memory made and lent.
struct Endpointed {
  Endpointed(Group& group, const Simple& c, const Options& options)
      : source(group.rank() == 0),
        device(select_device(group.rank())),
        memory(numbers(c.elements, 0)),
        transport(make(options)) {
    transport->connect(group, soon());
    session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                 Simple::buffers(group.rank(), memory.buffer()), soon());
  }
  void round(std::uint64_t version) const {
    session->start(version, soon());
    session->wait(soon());
  }

  bool source;
  int device;  ///< Current from here on.
  OnDevice memory;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Session> session;
};

// ------------------------------------------------------------------------ bodies of processes

/// One allocation of 2 MiB, tensors at 0, 64 B, 16 KiB and 128 KiB in it, on both sides.
void offsets_body(Group& group, const std::string&) {
  const std::vector<std::uint64_t> offsets = {0, 64, 16 << 10, 128 << 10};
  std::vector<Parameter> parameters;
  for (const std::uint64_t offset : offsets) {
    parameters.push_back(strided("at " + std::to_string(offset), {5}, {1}, DType::i64));
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Plan plan = direct_plan(problem);
  const int device = select_device(group.rank());
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
const RankBodyEntry kOffsets("offsets", offsets_body);

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
const RankBodyEntry kLeak("leak", leak_body);

/// Four sources have a group of their own beside that of all six. Rank 0 begins the round of all
/// before that of the four, the others after it.
void two_groups_body(Group& group, const std::string&) {
  const Simple all = Simple::make(1 << 18, group.size());
  const Simple four = Simple::make(1 << 18, 4);
  const Endpointed transfer(group, all, {{"path", "wire"}});
  std::unique_ptr<Group> sources;
  std::unique_ptr<Endpointed> gather;
  if (group.rank() < 4) {
    sources = testing::second_group(group.rank(), 4);
    gather = std::make_unique<Endpointed>(*sources, four, Options{{"path", "wire"}});
  }
  for (std::uint64_t round = 1; round <= 5; ++round) {
    const auto first = static_cast<std::int64_t>(round) * 1000;
    if (group.rank() == 0) {
      gather->memory.write(numbers(four.elements, first));
    }
    group.barrier("filled", soon());
    if (group.rank() == 0) {
      transfer.session->start(round, soon());
      gather->round(round);
      transfer.session->wait(soon());
    } else {
      if (gather) {
        gather->round(round);
      }
      transfer.round(round);
    }
    require(!gather || gather->memory.read() == numbers(four.elements, first), "gathered bytes");
    require(transfer.memory.read() == numbers(all.elements, 0), "transferred bytes");
    group.barrier("read", soon());
  }
}
const RankBodyEntry kTwoGroups("two groups", two_groups_body);

/// Rank 2 of three holds nothing of anything, and one parameter has no elements at all.
void empty_rank_body(Group& group, const std::string& path) {
  const auto on = [](const Shape& shape, Rank first, Rank count) {
    return std::make_shared<const Layout>(
        Layout::sharded(shape, DType::i64, Mesh({count}, first), {Placement::shard(0)}));
  };
  const Problem problem = Problem::make({
      {"one", {1}, {on({1}, 0, 1), {"one"}}, {on({1}, 1, 2), {"one"}}, false},
      {"none", {0, 7}, {on({0, 7}, 0, 1), {"none"}}, {on({0, 7}, 1, 2), {"none"}}, false},
  });
  const Plan plan = direct_plan(problem);
  select_device(group.rank());
  OnDevice memory(numbers(1, group.rank() == 0 ? 77 : 0));
  Buffers buffers{std::vector<LocalBuffer>(2), std::vector<LocalBuffer>(2)};
  if (group.rank() < 2) {
    (group.rank() == 0 ? buffers.source : buffers.destination)[0] = memory.buffer();
  }
  const auto transport = make({{"path", path}});
  transport->connect(group, soon());
  const auto session =
      transport->prepare(make_program(plan, problem, group.rank()), buffers, soon());
  for (std::uint64_t round = 1; round <= 3; ++round) {
    session->start(round, soon());
    const RoundReport report = session->wait(soon());
    require(report.peers.size() == (group.rank() < 2 ? 1U : 0U), "pairs without bytes are silent");
  }
  require(group.rank() != 1 || memory.read() == numbers(1, 77), "the one element");
  group.barrier("read", soon());
}
const RankBodyEntry kEmptyRank("empty rank", empty_rank_body);

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_cases_gpu)

// B01
BOOST_AUTO_TEST_CASE(a_view_arrives_as_its_elements_and_not_as_its_memory) {
  const Problem problem = Problem::make({strided("every other", {2}, {2}, DType::i64),
                                         strided("transposed", {4, 6}, {1, 4}, DType::i64)});
  Bytes transposed;
  for (Index row = 0; row < 4; ++row) {
    for (Index column = 0; column < 6; ++column) {
      const Bytes value = numbers(1, row + 4 * column);
      transposed.insert(transposed.end(), value.begin(), value.end());
    }
  }
  Bytes every_other = numbers(1, 0);
  const Bytes two = numbers(1, 2);
  every_other.insert(every_other.end(), two.begin(), two.end());
  for (const Options& options : kAllPaths) {
    const std::vector<Bytes> got = moved(problem, {numbers(4, 0), numbers(24, 0)}, options);
    BOOST_TEST_REQUIRE(got.size() == 2u);
    BOOST_TEST((got[0] == every_other));
    BOOST_TEST((got[1] == transposed));
  }
}

// B02
BOOST_AUTO_TEST_CASE(a_wider_source_is_cast_before_it_travels) {
  constexpr Index kElements = 100'003;
  Parameter p = strided("w", {kElements}, {1}, DType::f32);
  p.destination.layout = std::make_shared<const Layout>(Layout::explicit_pieces(
      {kElements}, DType::bf16, {1}, {{1, {Box::whole({kElements}), {0, 0, {1}}}}}));
  p.cast = true;
  const Problem problem = Problem::make({p});
  Bytes source(kElements * 4);
  for (Index i = 0; i < kElements; ++i) {
    const float value = 1.0F + static_cast<float>(i) * 1e-5F;
    std::memcpy(source.data() + i * 4, &value, 4);
  }
  Bytes wanted(kElements * 2);
  cast_elements(DType::f32, source.data(), DType::bf16, wanted.data(), kElements);
  for (const Options& options : kAllPaths) {
    const std::vector<Bytes> got = moved(problem, {source}, options);
    BOOST_TEST_REQUIRE(got.size() == 1u);
    BOOST_TEST((got[0] == wanted));
  }
}

// B03
BOOST_AUTO_TEST_CASE(a_round_sees_what_the_callers_stream_had_still_to_write) {
  constexpr Index kElements = 1 << 16;
  const Simple c = Simple::make(kElements, 2);
  none_failed(run_threads(2, [&](Group& group) {
    select_device(group.rank());
    cudaStream_t producer = nullptr;
    check(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking), "create a stream");
    {
      DeviceMemory delay(std::uint64_t{1} << 30);
      const Endpointed end(group, c,
                           {{"stream", std::to_string(reinterpret_cast<std::uint64_t>(producer))}});
      for (int round = 1; round <= 1000; ++round) {
        if (end.source) {
          check(cudaMemsetAsync(delay.data(), round, delay.bytes(), producer), "delay");
          check(cudaMemsetAsync(end.memory.data(), round, kElements * 8, producer), "produce");
        }
        end.round(static_cast<std::uint64_t>(round));
        require(
            end.source || end.memory.read() == Bytes(kElements * 8, static_cast<std::byte>(round)),
            "round " + std::to_string(round) + " saw old values");
        group.barrier("read", soon());
      }
    }
    cudaStreamDestroy(producer);
  }));
}

// B04
BOOST_AUTO_TEST_CASE(a_source_may_be_overwritten_as_soon_as_its_round_is_over) {
  const Simple c = Simple::make(3'000'017, 2);
  for (const Options& options : kAllPaths) {
    none_failed(run_threads(2, [&](Group& group) {
      Endpointed end(group, c, options);
      for (int round = 1; round <= 50; ++round) {
        const Bytes fresh = numbers(c.elements, round * 1000);
        if (end.source) {
          end.memory.write(fresh);
        }
        group.barrier("filled", soon());
        end.round(static_cast<std::uint64_t>(round));
        if (end.source) {
          check(cudaMemsetAsync(end.memory.data(), 0xFF, fresh.size(), cudaStreamPerThread),
                "reuse the source");
        } else {
          require(end.memory.read() == fresh, "bytes of round " + std::to_string(round));
        }
        check(cudaDeviceSynchronize(), "reuse the source");
        group.barrier("read", soon());
      }
    }));
  }
}

// B05
BOOST_AUTO_TEST_CASE(rounds_of_two_groups_that_ranks_begin_in_different_orders_end) {
  ranks_succeed(6, "two groups", "-", true);
}

// B06
BOOST_AUTO_TEST_CASE(a_round_is_over_only_when_every_byte_can_be_read) {
  constexpr Index kElements = 6'000'011;
  const Simple c = Simple::make(kElements, 2);
  for (const Options& options : kAllPaths) {
    std::uint64_t wanted = 0;
    none_failed(run_threads(2, [&](Group& group) {
      const Endpointed end(group, c, options);
      const auto digest = [&] {
        return device_digest_of_box({kElements}, Box::whole({kElements}), DType::i64,
                                    end.memory.data(), {1});
      };
      for (std::uint64_t round = 1; round <= 100; ++round) {
        if (end.source) {
          device_fill_synthetic({kElements}, Box::whole({kElements}), DType::i64, round,
                                end.memory.data(), {1});
          wanted = digest();
        }
        group.barrier("filled", soon());
        end.round(round);
        require(end.source || digest() == wanted, "digest of round " + std::to_string(round));
        group.barrier("read", soon());
      }
    }));
  }
}

// B09
BOOST_AUTO_TEST_CASE(tensors_inside_one_allocation_are_found_by_their_offsets) {
  ranks_succeed(2, "offsets", "-", false);
}

// B10
BOOST_AUTO_TEST_CASE(fifty_sessions_leave_no_device_memory_behind) {
  ranks_succeed(2, "leak", "-", false);
}

// B11
BOOST_AUTO_TEST_CASE(a_graph_that_was_captured_before_an_update_reads_the_new_weights) {
  const Simple c = Simple::make(100'003, 2);
  for (const Options& options : kMapped) {
    none_failed(run_threads(2, [&](Group& group) {
      Endpointed end(group, c, options);
      OnDevice output(Bytes(static_cast<std::size_t>(c.elements) * 8));
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      check(cudaMemcpyAsync(output.data(), end.memory.data(),
                            static_cast<std::size_t>(c.elements) * 8, cudaMemcpyDeviceToDevice,
                            stream),
            "use the weights");
      check(cudaStreamEndCapture(stream, &graph), "capture");
      check(cudaGraphInstantiate(&replay, graph, 0), "make a graph");
      for (int round = 1; round <= 3; ++round) {
        const Bytes fresh = numbers(c.elements, round * 1000);
        if (end.source) {
          end.memory.write(fresh);
        }
        group.barrier("filled", soon());
        end.round(static_cast<std::uint64_t>(round));
        check(cudaGraphLaunch(replay, stream), "replay");
        check(cudaStreamSynchronize(stream), "replay");
        require(output.read() == fresh, "weights of round " + std::to_string(round));
        group.barrier("read", soon());
      }
      cudaGraphExecDestroy(replay);
      cudaGraphDestroy(graph);
      cudaStreamDestroy(stream);
    }));
  }
}

BOOST_AUTO_TEST_CASE(a_replayed_round_moves_the_values_of_now) {
  for (const char* graph : {"on", "off"}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(20'000'003, 2), {{"graph", graph}}, 4);
    }));
  }
}

// B14
BOOST_AUTO_TEST_CASE(the_memory_of_a_session_does_not_depend_on_how_much_it_moves) {
  constexpr std::uint64_t kStaging = 64 << 20;
  const auto cost = [](Index tensors, Index elements, const Options& options) {
    std::vector<Parameter> parameters;
    for (Index i = 0; i < tensors; ++i) {
      parameters.push_back(strided("w" + std::to_string(i), {elements}, {1}, DType::i64));
    }
    const Problem problem = Problem::make(std::move(parameters));
    const Plan plan = direct_plan(problem);
    std::vector<std::uint64_t> extra(2);
    none_failed(run_threads(2, [&](Group& group) {
      const int device = select_device(group.rank());
      const auto bytes = static_cast<std::uint64_t>(elements) * 8;
      DeviceMemory memory(static_cast<std::uint64_t>(tensors) * bytes);
      Buffers buffers{std::vector<LocalBuffer>(static_cast<std::size_t>(tensors)),
                      std::vector<LocalBuffer>(static_cast<std::size_t>(tensors))};
      // In another order at the worker, so that regions stay apart.
      for (Index i = 0; i < tensors; ++i) {
        const auto at = static_cast<std::uint64_t>(group.rank() == 0 ? i : tensors - 1 - i);
        (group.rank() == 0 ? buffers.source : buffers.destination)[static_cast<std::size_t>(i)] = {
            memory.data() + at * bytes, bytes, MemorySpace::device, device};
      }
      const auto transport = make(options);
      transport->connect(group, soon());
      const auto session =
          transport->prepare(make_program(plan, problem, group.rank()), buffers, soon());
      session->start(1, soon());
      session->wait(soon());
      group.barrier("first", soon());
      const std::uint64_t before = memory_in_use();
      for (std::uint64_t round = 2; round <= 4; ++round) {
        session->start(round, soon());
        session->wait(soon());
      }
      require(memory_in_use() == before, "a round allocates device memory");
      const SessionFigures figures = figures_of(*session);
      extra[static_cast<std::size_t>(group.rank())] = figures.device_bytes - figures.table_bytes;
      group.barrier("measured", soon());
    }));
    return extra;
  };
  const Options wire = {{"path", "wire"}, {"staging_bytes", std::to_string(kStaging)}};
  const auto few = cost(8, Index{1} << 27, wire);      // 8 of 1 GiB
  const auto many = cost(4096, Index{1} << 18, wire);  // 4096 of 2 MiB
  for (std::size_t rank = 0; rank < 2; ++rank) {
    BOOST_TEST(few[rank] <= kStaging + (1 << 20));
    BOOST_TEST(many[rank] <= kStaging + (1 << 20));
  }
  for (const std::uint64_t bytes : cost(4096, Index{1} << 18, {})) {
    BOOST_TEST(bytes < 1u << 20);
  }
}

// B15
BOOST_AUTO_TEST_CASE(a_hundred_rounds_leave_no_host_memory_behind) {
  const Simple c = Simple::make(1 << 20, 2);
  for (const Options& options : kAllPaths) {
    none_failed(run_threads(2, [&](Group& group) {
      const Endpointed end(group, c, options);
      std::uint64_t fifth = 0;
      for (std::uint64_t round = 1; round <= 100; ++round) {
        end.round(round);
        if (round == 5) {
          fifth = resident_bytes();
        }
      }
      require(resident_bytes() <= fifth + fifth / 50, "resident bytes grew from " +
                                                          std::to_string(fifth) + " to " +
                                                          std::to_string(resident_bytes()));
      group.barrier("measured", soon());
    }));
  }
}

// B17
BOOST_AUTO_TEST_CASE(nothing_to_move_is_a_round_too) {
  for (const char* path : {"auto", "wire"}) {
    none_failed(run_threads(2, [&](Group& group) {
      simple_rounds(group, Simple::make(0, 2), {{"path", path}}, 2);
    }));
    ranks_succeed(3, "empty rank", path, true);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl
