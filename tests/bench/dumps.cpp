// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Figures of dumps, each beside its limit: 4 GiB of shards against a plain write of the same bytes
/// in the same run, what reading one shard touches, and a plan of ten million regions, there and
/// back. Usage: bench_dumps [FOLDER], where there is room for 9 GiB; by default the working folder.

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "core/io/atomic_file.hpp"
#include "core/io/dump_tensors.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

using Clock = std::chrono::steady_clock;

/// One row more than 4 GiB, so that no 32-bit size holds it.
constexpr Index kRowBytes = 4096;
constexpr Index kRows = (Index{1} << 20) + 1;
constexpr Index kBytes = kRows * kRowBytes;
constexpr int kRepeats = 3;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A disk that others use as well makes some runs slower, and none faster.
double best(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

Side rows_over(Rank ranks, Rank start) {
  return {std::make_shared<const Layout>(Layout::sharded(
              {kRows, kRowBytes}, DType::u8, Mesh({ranks}, start), {Placement::shard(0)})),
          {"w"}};
}

/// Writes all of @p data as the shards of @p ranks ranks.
void dump_shards(const std::filesystem::path& file, const std::byte* data, Rank ranks) {
  const Parameter parameter{
      "w", {kRows, kRowBytes}, rows_over(ranks, 0), rows_over(ranks, 0), false};
  DumpWriter dump(file);
  for (Rank rank = 0; rank < ranks; ++rank) {
    const CompactShard shard = parameter.source.layout->compact(rank);
    dump.shard(Role::source, rank, parameter, shard,
               data + shard.pieces.front().box.lo[0] * kRowBytes);
  }
  dump.stitch(Role::source);
  dump.commit();
}

/// The same bytes, made durable and renamed likewise.
void write_plainly(const std::filesystem::path& file, const std::byte* data) {
  AtomicFile out(file);
  out.write({data, static_cast<std::size_t>(kBytes)});
  out.commit();
}

template <class Write>
double timed(const std::filesystem::path& file, Write&& write) {
  std::filesystem::remove(file);
  ::sync();  // what others have written is not ours to wait for
  const auto start = Clock::now();
  write();
  return seconds_since(start);
}

std::uint64_t bytes_read_by_this_process() {
  std::ifstream io("/proc/self/io");
  std::string key;
  std::uint64_t value = 0;
  io >> key >> value;
  return value;
}

void bench_shards(const std::filesystem::path& folder) {
  const std::unique_ptr<std::byte[]> data(new std::byte[static_cast<std::size_t>(kBytes)]);
  fill_synthetic({kBytes}, Box{Dims{0}, Dims{kBytes}}, DType::u8, 7, data.get(), Strides{1});
  const std::filesystem::path file = folder / "bench-dump.h5";
  const std::filesystem::path plain_file = folder / "bench-plain";
  std::vector<double> plain;
  std::vector<double> one;
  std::vector<double> many;
  for (int i = 0; i < kRepeats; ++i) {
    plain.push_back(timed(plain_file, [&] { write_plainly(plain_file, data.get()); }));
    std::filesystem::remove(plain_file);
    many.push_back(timed(file, [&] { dump_shards(file, data.get(), 32); }));
    one.push_back(timed(file, [&] { dump_shards(file, data.get(), 1); }));
    std::printf("  plain %.2f s, 32 shards %.2f s, one tensor %.2f s\n", plain.back(), many.back(),
                one.back());
  }
  const double gigabytes = static_cast<double>(kBytes) / 1e9;
  std::printf("%.2f GB, made durable, best of %d:\n", gigabytes, kRepeats);
  std::printf("  plain write          %7.2f GB/s\n", gigabytes / best(plain));
  std::printf("  dump of 32 shards    %7.2f GB/s, %.2f of it\n", gigabytes / best(many),
              best(plain) / best(many));
  std::printf("  dump of one tensor   %7.2f GB/s, %.2f of it\n", gigabytes / best(one),
              best(plain) / best(one));

  // The file holds the last dump: one shard above 4 GiB.
  const DumpReader dump(file);
  const DumpShard shard = dump.shards(Role::source).at(0);
  const std::uint64_t before = bytes_read_by_this_process();
  std::vector<std::byte> row(static_cast<std::size_t>(kRowBytes));
  dump.read(shard, 0, {Dims{kRows - 1, 0}, Dims{kRows, kRowBytes}}, row.data(), {kRowBytes, 1});
  const std::uint64_t touched = bytes_read_by_this_process() - before;
  if (std::memcmp(row.data(), data.get() + kBytes - kRowBytes, row.size()) != 0) {
    throw Error(Errc::io, "the last row of a tensor above 4 GiB is wrong");
  }
  std::printf("  its last %lld bytes are right, and reading them touched %llu\n",
              static_cast<long long>(kRowBytes), static_cast<unsigned long long>(touched));
  const auto start = Clock::now();
  dump.verify();
  std::printf("  verified             %7.2f GB/s\n", gigabytes / seconds_since(start));
  std::filesystem::remove(file);
}

void bench_plan(const std::filesystem::path& folder) {
  // 1,333 regions a parameter.
  const Shape shape{2000};
  const auto source = std::make_shared<const Layout>(
      Layout::sharded(shape, DType::bf16, Mesh({1000}, 0), {Placement::shard(0)}));
  const auto destination = std::make_shared<const Layout>(
      Layout::sharded(shape, DType::bf16, Mesh({667}, 1000), {Placement::shard(0)}));
  std::vector<Parameter> parameters;
  for (int i = 0; i < 7600; ++i) {
    const std::string name = "w" + std::to_string(i);
    parameters.push_back({name, shape, {source, {name}}, {destination, {name}}, false});
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Registries registries = builtin_registries();
  const Plan plan = registries.planners.create("direct", {})
                        ->plan(problem, Topology::single_island(problem.world_size()));
  const std::uint64_t regions = summarize(plan, problem).regions;
  const std::filesystem::path file = folder / "bench-plan.h5";
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto before_kib = usage.ru_maxrss;
  auto start = Clock::now();
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.plan(plan, problem);
    dump.commit();
  }
  const double written = seconds_since(start);
  ::getrusage(RUSAGE_SELF, &usage);
  start = Clock::now();
  const DumpReader dump(file);
  const Plan back = dump.plan(dump.problem());
  const double read = seconds_since(start);
  if (back.digest != plan.digest || regions < 10'000'000) {
    throw Error(Errc::io, "the plan came back as another one, or has too few regions");
  }
  std::printf(
      "a plan of %.1f million regions: %.2f GB written in %.2f s with %ld MiB more memory, "
      "read back in %.2f s with the same digest\n",
      static_cast<double>(regions) / 1e6,
      static_cast<double>(std::filesystem::file_size(file)) / 1e9, written,
      (usage.ru_maxrss - before_kib) / 1024, read);
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace m2n

int main(int argc, char** argv) {
  try {
    const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // it takes a while
    m2n::bench_plan(folder);  // first: its memory is not to hide behind the other's
    m2n::bench_shards(folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_dumps: %s\n", error.what());
    return 1;
  }
  return 0;
}
