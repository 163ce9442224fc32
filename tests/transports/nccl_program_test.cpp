// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The NCCL transport's host logic, without a GPU: tables, the division of work, chunks of the
/// wire.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/cast.hpp"
#include "tests/transports/nccl_random_copy.hpp"
#include "transports/nccl/process.hpp"
#include "transports/nccl/tables.hpp"
#include "transports/nccl/wire.hpp"

namespace m2n::nccl {
namespace {

using testing::Bytes;
using testing::random_bytes;
using testing::random_copy;
using testing::RandomCopy;

const std::vector<std::pair<DType, DType>> kAllTypes = [] {
  std::vector<std::pair<DType, DType>> all = testing::kCopyTypes;
  all.insert(all.end(), testing::kQuantisedTypes.begin(), testing::kQuantisedTypes.end());
  return all;
}();

std::uint64_t address_of(const Bytes& bytes, std::uint64_t offset = 0) {
  return reinterpret_cast<std::uint64_t>(bytes.data()) + offset;
}

Placed run(std::uint64_t source, std::uint64_t destination, Index bytes) {
  return {{{bytes}, {1}, {1}, DType::u8, DType::u8}, source, destination, 0};
}

/// What the list kernel does, one element of one unit at a time, as its comment says. Counts how
/// often each unit is dealt out.
void run_list(const Tables& tables, const ListSlice& slice, DType from, DType to) {
  std::uint64_t tiles = 0;
  for (std::uint64_t t = slice.begin; t < slice.begin + slice.count; ++t) {
    const Task& task = tables.tasks[t];
    BOOST_TEST_REQUIRE(task.first_tile == tiles);
    const std::uint64_t units = task.rows * task.row_units;
    tiles += (units + kTileUnits - 1) / kTileUnits;
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      std::uint64_t row = unit / task.row_units;
      const std::uint64_t in_row = unit % task.row_units;
      std::uint64_t source = task.source;
      std::uint64_t destination = task.destination;
      std::uint64_t scales = task.scales;
      for (std::uint32_t l = 0; l < task.loop_count; ++l) {
        const Loop& loop = tables.loops[task.first_loop + l];
        const auto at = static_cast<std::int64_t>(row % loop.extent);
        row /= loop.extent;
        source += static_cast<std::uint64_t>(at * loop.source_step);
        destination += static_cast<std::uint64_t>(at * loop.destination_step);
        scales += static_cast<std::uint64_t>(at * loop.scale_step);
      }
      if (task.convert == Convert::none) {
        const std::uint64_t segment = destination / 16 * 16 + in_row * 16;
        const std::uint64_t first = std::max(segment, destination);
        const std::uint64_t last = std::min(segment + 16, destination + task.row_bytes);
        if (first < last) {
          std::memcpy(reinterpret_cast<void*>(first),
                      reinterpret_cast<const void*>(source + (first - destination)), last - first);
        }
        continue;
      }
      const std::uint64_t elements = task.row_bytes / bytes_of(to);
      const std::uint64_t most = can_quantise(from, to) ? kQuantiseUnit : kCastUnit;
      const std::uint64_t first = in_row * most;
      const std::uint64_t count = std::min(most, elements - first);
      if (can_quantise(from, to)) {
        float scale = 0;
        std::memcpy(&scale, reinterpret_cast<const void*>(scales), sizeof scale);
        quantise_f8_e4m3(from, reinterpret_cast<const std::byte*>(source + first * bytes_of(from)),
                         scale, reinterpret_cast<std::byte*>(destination + first), count);
        continue;
      }
      cast_elements(from, reinterpret_cast<const std::byte*>(source + first * bytes_of(from)), to,
                    reinterpret_cast<std::byte*>(destination + first * bytes_of(to)), count);
    }
  }
  BOOST_TEST(slice.tiles == tiles);
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_program)

BOOST_AUTO_TEST_CASE(a_list_writes_the_bytes_that_a_host_copy_writes_and_no_other) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 3000; ++i) {
    const auto [from, to] = kAllTypes[static_cast<std::size_t>(i) % kAllTypes.size()];
    const RandomCopy c = random_copy(random, from, to, i % 7 == 0 ? 40 : 9);
    const Bytes source = random_bytes(c.source_bytes, random);
    const Bytes before = random_bytes(c.destination_bytes, random);
    Bytes expected = before;
    Bytes got = before;
    copy_region(c.copy, source.data() + c.source_offset, expected.data() + c.destination_offset,
                false, c.first_scale());
    Tables tables;
    const std::vector<Placed> regions = {{c.copy, address_of(source, c.source_offset),
                                          address_of(got, c.destination_offset),
                                          address_of(c.scales, c.scale_offset)}};
    run_list(tables, append_list(regions, tables), from, to);
    BOOST_TEST_REQUIRE((got == expected), "copy " << i);
  }
}

BOOST_AUTO_TEST_CASE(an_empty_region_adds_no_task) {
  Tables tables;
  const std::vector<Placed> regions = {run(16, 32, 0), run(16, 32, 5), run(16, 32, 0)};
  const ListSlice slice = append_list(regions, tables);
  BOOST_TEST(slice.count == 1u);
  BOOST_TEST(slice.tiles == 1u);
}

BOOST_AUTO_TEST_CASE(a_region_above_4_gib_has_64_bit_tiles) {
  Tables tables;
  const Index bytes = (Index{9} << 30) + 3;
  const std::vector<Placed> regions = {run(4096, 8192, bytes), run(4096, 8192, 1)};
  const ListSlice slice = append_list(regions, tables);
  const std::uint64_t tiles = ((std::uint64_t{9} << 30) / 16 + 1 + kTileUnits - 1) / kTileUnits;
  BOOST_TEST(tables.tasks[1].first_tile == tiles);
  BOOST_TEST(slice.tiles == tiles + 1);
}

BOOST_AUTO_TEST_CASE(a_pair_of_types_without_a_cast_is_refused) {
  Tables tables;
  const std::vector<Placed> regions = {{{{4}, {1}, {1}, DType::i32, DType::f32}, 16, 32}};
  BOOST_CHECK_EXCEPTION(append_list(regions, tables), Error, [](const Error& error) {
    return error.code() == Errc::bad_argument &&
           std::string(error.what()).find("i32") != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(regions_that_follow_one_another_on_both_sides_become_one) {
  std::vector<Placed> regions;
  for (std::uint64_t i = 0; i < 100; ++i) {  // any order
    const std::uint64_t at = (i * 37) % 100;
    regions.push_back(run(1000 + at * 8, 9000 + at * 8, 8));
  }
  regions.push_back(run(1000 + 800, 20'000, 8));  // adjacent at the source alone
  const std::vector<Placed> merged = merge_adjacent(regions);
  BOOST_TEST_REQUIRE(merged.size() == 2u);
  BOOST_TEST(merged[0].bytes() == 800u);
  BOOST_TEST(merged[1].bytes() == 8u);
}

BOOST_AUTO_TEST_CASE(neighbours_in_reverse_or_with_a_gap_stay_apart) {
  BOOST_TEST(merge_adjacent({run(0, 1000, 8), run(8, 992, 8)}).size() == 2u);
  BOOST_TEST(merge_adjacent({run(0, 1000, 8), run(16, 1016, 8)}).size() == 2u);
  BOOST_TEST(merge_adjacent({run(0, 1000, 8), run(8, 1009, 8)}).size() == 2u);
}

BOOST_AUTO_TEST_CASE(engines_take_the_large_copies_and_leave_the_kernel_enough_to_fill_pauses) {
  const EngineModel model;
  std::vector<Placed> regions;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    regions.push_back(run(i * (2 << 20), (1ULL << 40) + i * (3 << 20), 1 << 20));
  }
  const Division division = divide(regions, model);
  BOOST_TEST(division.engine.size() + division.list.size() == 1000u);
  const double share = static_cast<double>(division.engine.size()) / 1000;
  BOOST_TEST(share > 0.75);
  BOOST_TEST(share < 0.85);
}

BOOST_AUTO_TEST_CASE(one_large_copy_goes_to_an_engine_whole_and_small_ones_to_the_kernel) {
  const Division large = divide({run(0, 1 << 30, 1 << 30)}, {});
  BOOST_TEST(large.engine.size() == 1u);
  BOOST_TEST(large.list.empty());
  const Division small = divide({run(0, 1 << 30, 65'536), run(1 << 20, 3 << 20, 65'536)}, {});
  BOOST_TEST(small.engine.empty());
  BOOST_TEST(small.list.size() == 2u);
}

BOOST_AUTO_TEST_CASE(rows_at_a_pitch_are_one_engine_copy_and_casts_never_are) {
  const Placed rows{{{65'536, 1024}, {4096, 1}, {1024 + 8, 1}, DType::bf16, DType::bf16}, 0, 64};
  const Division division = divide({rows}, {});
  BOOST_TEST_REQUIRE(division.engine.size() == 1u);
  BOOST_TEST((division.engine[0] == EngineCopy{0, 64, 2048, 65'536, 8192, 2064}));
  const Placed cast{{{1 << 26}, {1}, {1}, DType::f32, DType::bf16}, 0, 1 << 30};
  BOOST_TEST(divide({cast}, {}).engine.empty());
  const Placed narrow{{{1 << 20, 8}, {64, 1}, {16, 1}, DType::bf16, DType::bf16}, 0, 64};
  BOOST_TEST(divide({narrow}, {}).engine.empty());
}

BOOST_AUTO_TEST_CASE(the_number_of_engine_copies_can_be_limited) {
  EngineModel model;
  model.max_copies = 3;
  std::vector<Placed> regions;
  for (std::uint64_t i = 0; i < 10; ++i) {
    regions.push_back(run(i << 30, (1ULL << 40) + (i << 31), 32 << 20));
  }
  BOOST_TEST(divide(regions, model).engine.size() == 3u);
}

BOOST_AUTO_TEST_CASE(where_queueing_all_copies_takes_the_host_too_long_only_large_ones_are_queued) {
  EngineModel model;
  model.gap_bytes = 0;
  model.host_us = 500;
  std::vector<Placed> regions = {run(0, 1ULL << 40, 1 << 30)};
  for (std::uint64_t i = 1; i < 1000; ++i) {  // 550 us
    regions.push_back(run(i << 31, (1ULL << 40) + (i << 32), 3 << 20));
  }
  const Division some = divide(regions, model);
  BOOST_TEST_REQUIRE(some.engine.size() == 1u);
  BOOST_TEST(some.engine[0].row_bytes == 1u << 30);
  BOOST_TEST(some.list.size() == 999u);
  model.host_us = 551;
  BOOST_TEST(divide(regions, model).engine.size() == 1000u);
  model.host_us = 0;
  model.host_worth = 0;
  BOOST_TEST(divide(regions, model).engine.size() == 1000u);
}

/// Moves @p copies over the wire in memory: pack, hand over chunk by chunk, unpack.
void move_by_wire(const std::vector<RandomCopy>& copies, const WireLimits& limits,
                  std::mt19937_64& random) {
  std::vector<Bytes> sources;
  std::vector<Bytes> expected;
  std::vector<Bytes> got;
  PairRegions send{.peer = 1, .regions = {}};
  PairRegions receive{.peer = 0, .regions = {}};
  for (const RandomCopy& c : copies) {
    sources.push_back(random_bytes(c.source_bytes, random));
    got.push_back(random_bytes(c.destination_bytes, random));
    expected.push_back(got.back());
    copy_region(c.copy, sources.back().data() + c.source_offset,
                expected.back().data() + c.destination_offset, false, c.first_scale());
    send.regions.push_back({c.copy, address_of(sources.back(), c.source_offset), 0,
                            address_of(c.scales, c.scale_offset)});
    receive.regions.push_back({c.copy, 0, address_of(got.back(), c.destination_offset), 0});
  }
  const std::uint64_t slot = slot_bytes_for(1, limits);
  Bytes out(2 * slot + 256);
  Bytes in(2 * slot + 256);
  const auto staging = [&](const Bytes& bytes) {
    return Staging{(address_of(bytes) + 255) / 256 * 256, slot};
  };
  Tables packs;
  Tables unpacks;
  const auto sends = compile_wire(std::vector{send}, {}, limits, staging(out), packs);
  const auto receives = compile_wire({}, std::vector{receive}, limits, staging(in), unpacks);
  BOOST_TEST_REQUIRE(sends.size() == receives.size());
  for (std::size_t s = 0; s < sends.size(); ++s) {
    std::fill(out.begin(), out.end(), std::byte{0xEE});
    run_list(packs, sends[s].pack, copies[0].copy.source_dtype, copies[0].copy.destination_dtype);
    BOOST_TEST_REQUIRE(sends[s].sends.size() == receives[s].receives.size());
    std::uint64_t staged = 0;
    for (std::size_t m = 0; m < sends[s].sends.size(); ++m) {
      const Message& from = sends[s].sends[m];
      const Message& to = receives[s].receives[m];
      BOOST_TEST_REQUIRE(from.bytes == to.bytes);
      BOOST_TEST_REQUIRE(from.bytes > 0u);
      std::memcpy(reinterpret_cast<void*>(to.address), reinterpret_cast<void*>(from.address),
                  from.bytes);
      const std::uint64_t begin = address_of(out);
      staged += from.address >= begin && from.address < begin + out.size() ? from.bytes : 0;
    }
    BOOST_TEST_REQUIRE(staged <= limits.chunk_bytes);
    run_list(unpacks, receives[s].unpack, copies[0].copy.destination_dtype,
             copies[0].copy.destination_dtype);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    BOOST_TEST_REQUIRE((got[i] == expected[i]), "region " << i);
  }
}

BOOST_AUTO_TEST_CASE(a_wire_delivers_any_regions_through_bounded_chunks) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 300; ++i) {
    const auto [from, to] = kAllTypes[static_cast<std::size_t>(i) % kAllTypes.size()];
    std::vector<RandomCopy> copies;
    const std::size_t count = 1 + random() % 12;
    for (std::size_t c = 0; c < count; ++c) {
      copies.push_back(random_copy(random, from, to, i % 3 == 0 ? 24 : 8));
    }
    move_by_wire(copies, {16 << 10, i % 2 == 0 ? 4096ULL : 1ULL << 40, 10'000}, random);
  }
}

BOOST_AUTO_TEST_CASE(large_runs_skip_the_staging_and_are_cut_at_the_end_of_a_step) {
  const StridedCopy big{{100}, {1}, {1}, DType::i64, DType::i64};
  const auto steps = cut_pair(std::vector{big, big}, {16 << 10, 800, 1000});
  BOOST_TEST_REQUIRE(steps.size() == 2u);
  BOOST_TEST_REQUIRE(steps[0].direct.size() == 2u);
  BOOST_TEST(steps[0].direct[0].bytes == 800u);
  BOOST_TEST(steps[0].direct[1].bytes == 200u);
  BOOST_TEST(steps[1].direct[0].bytes == 600u);
  BOOST_TEST(steps[1].direct[0].source_offset == 200);
  BOOST_TEST(steps[0].staged_bytes == 0u);
}

BOOST_AUTO_TEST_CASE(pairs_without_bytes_have_no_step) {
  BOOST_TEST(cut_pair({}, {}).empty());
  const StridedCopy none{{0}, {1}, {1}, DType::i64, DType::i64};
  BOOST_TEST(cut_pair(std::vector{none}, {}).empty());
}

BOOST_AUTO_TEST_CASE(staging_is_shared_by_the_peers_and_never_below_a_useful_chunk) {
  BOOST_TEST(chunk_bytes_for(64 << 20, 1) == 32u << 20);
  BOOST_TEST(chunk_bytes_for(64 << 20, 2) == 16u << 20);
  BOOST_TEST(chunk_bytes_for(64 << 20, 1 << 20) == 16u << 10);
}

/// Waits until process @p child is seen as @p wanted, at most ten seconds.
ProcessState state_once(pid_t child, ProcessState wanted) {
  const auto number = static_cast<std::uint64_t>(child);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (process_state(number, process_space()) != wanted &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return process_state(number, process_space());
}

BOOST_AUTO_TEST_CASE(a_process_is_seen_to_run_to_be_stopped_and_to_end) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) {
      pause();
    }
  }
  BOOST_TEST_REQUIRE(child > 0);
  BOOST_TEST((state_once(child, ProcessState::running) == ProcessState::running));
  kill(child, SIGSTOP);
  BOOST_TEST((state_once(child, ProcessState::stopped) == ProcessState::stopped));
  BOOST_TEST(
      (process_state(static_cast<std::uint64_t>(child), "elsewhere") == ProcessState::unknown));
  kill(child, SIGKILL);
  BOOST_TEST((state_once(child, ProcessState::ended) == ProcessState::ended));
  waitpid(child, nullptr, 0);
  BOOST_TEST((state_once(child, ProcessState::ended) == ProcessState::ended));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl
