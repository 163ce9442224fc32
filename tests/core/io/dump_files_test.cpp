// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <random>
#include <thread>

#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

using namespace testing;

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

BOOST_AUTO_TEST_CASE(without_commit_the_old_dump_stays_and_nothing_else) {  // D08
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  write_tensor(file, replicated("w", {10}, DType::f32), global_tensor("w", {10}, DType::f32));
  const std::string old = testing::read_file(file);
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "new"}});
    BOOST_TEST(files_in(folder.path()).size() == 2U);
  }
  BOOST_TEST((files_in(folder.path()) == std::vector<std::string>{"d.h5"}));
  BOOST_TEST((testing::read_file(file) == old));
  try {
    DumpWriter dump(file);
    dump.shard(Role::source, 0, replicated("w", {4}, DType::f4), {}, nullptr);
  } catch (const Error&) {
    BOOST_TEST((files_in(folder.path()) == std::vector<std::string>{"d.h5"}));
  }
  BOOST_TEST((testing::read_file(file) == old));
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "new"}});
    dump.commit();
    expect_error(Errc::bad_argument, {"commit"}, [&] { dump.commit(); });
    expect_error(Errc::bad_argument, {"commit"}, [&] { dump.experiment({{"late", ""}}); });
  }
  BOOST_TEST((files_in(folder.path()) == std::vector<std::string>{"d.h5"}));
  BOOST_TEST(DumpReader(file).fact("config").value() == "new");
}

BOOST_AUTO_TEST_CASE(places_that_cannot_be_written_are_named) {
  const TemporaryFolder folder;
  expect_error(Errc::io, {"none"}, [&] { DumpWriter dump(folder / "none" / "d.h5"); });
  expect_error(Errc::io, {folder.path().string()}, [&] { DumpWriter dump(folder.path()); });
}

/// Runs @p body in a child process. @return its process id.

BOOST_AUTO_TEST_CASE(a_full_disk_is_an_error_and_leaves_the_old_dump) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = replicated("w", {1 << 24}, DType::u8);
  const auto data = global_tensor("w", {1 << 24}, DType::u8);
  write_tensor(file, replicated("w", {10}, DType::f32), global_tensor("w", {10}, DType::f32));
  const std::string old = testing::read_file(file);
  const int status = wait_for(start_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);  // as on a full disk: the write fails
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_tensor(file, parameter, data);
    } catch (const Error& error) {
      return error.code() == Errc::io && contains(error.what(), "d.h5") ? 0 : 1;
    }
    return 2;
  }));
  BOOST_TEST((WIFEXITED(status) && WEXITSTATUS(status) == 0), "status " << status);
  BOOST_TEST((files_in(folder.path()) == std::vector<std::string>{"d.h5"}));
  BOOST_TEST((testing::read_file(file) == old));
}

/// A dump whose every part depends on @p version.
void write_version(const std::filesystem::path& file, int version) {
  DumpWriter dump(file);
  dump.experiment({{"config", std::to_string(version)}});
  for (int i = 0; i < 20; ++i) {
    const Parameter parameter = replicated("w" + std::to_string(i), {50000}, DType::i32);
    const std::vector<std::int32_t> data(50000, version);
    dump.shard(Role::destination, 1, parameter, parameter.destination.layout->compact(1),
               bytes_of_values(data).data());
  }
  dump.stitch(Role::destination);
  dump.commit();
}

/// @return the version of a whole dump; 0 when any part of it is of another.
int whole_version(const std::filesystem::path& file) {
  const DumpReader dump(file);
  dump.verify();
  const int version = std::stoi(dump.fact("config").value());
  const auto shards = dump.shards(Role::destination);
  std::vector<std::int32_t> out(50000);
  for (const DumpShard& shard : shards) {
    dump.read(shard, reinterpret_cast<std::byte*>(out.data()));
    if (out != std::vector<std::int32_t>(50000, version)) {
      return 0;
    }
  }
  return shards.size() == 20 ? version : 0;
}

BOOST_AUTO_TEST_CASE(a_writer_killed_at_any_point_leaves_the_old_or_a_new_dump_whole) {  // D05, D08
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::mt19937_64 random(seed());
  const auto begin = std::chrono::steady_clock::now();
  write_version(file, 1);
  const auto span = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::steady_clock::now() - begin);
  int current = 1;
  for (int child_number = 0; child_number < 20; ++child_number) {
    const std::chrono::nanoseconds delay(
        1 + random() % static_cast<std::uint64_t>(span.count() * 3 / 2 + 1));
    // The child writes one dump over another until its own timer ends it: however fast or slow the
    // machine is, the kill hits a writer at work.
    const pid_t child = start_child([&] {
      if (!die_after(delay)) {
        return 97;
      }
      for (int version = current + 1;; ++version) {
        write_version(file, version);
      }
    });
    int status = 0;
    int seen = current;
    do {  // a reader meets one dump or a later one, too
      const int now = whole_version(file);
      BOOST_TEST(now >= seen, "a reader saw " << now << " after " << seen);
      seen = now;
    } while (::waitpid(child, &status, WNOHANG) == 0);
    BOOST_TEST((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL), "status " << status);
    const int found = whole_version(file);
    BOOST_TEST(found >= seen, "found " << found << " after a kill at " << delay.count() << " ns");
    current = found;
  }
  // What the killed ones left behind is no dump or a whole one, and in nobody's way.
  for (const std::string& name : files_in(folder.path())) {
    int left = -1;
    try {
      left = whole_version(folder / name);
    } catch (const Error&) {
      continue;
    }
    BOOST_TEST(left > 0, name);
  }
  write_version(file, current + 1);
  BOOST_TEST(whole_version(file) == current + 1);
}

BOOST_AUTO_TEST_CASE(
    a_file_that_is_open_for_writing_is_refused_also_when_it_looks_complete) {  // D07
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  write_version(file, 1);
  // A writer that has flushed everything, its mark of completion too, and dies before it closes.
  const int status = wait_for(start_child([&] {
    DumpWriter dump(file);
    dump.experiment({{"config", "2"}});
    const h5::Lock lock;
    for (const std::string& name : files_in(folder.path())) {
      if (name != "d.h5") {
        const hid_t same = H5Fopen((folder / name).c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
        const hid_t space = H5Screate(H5S_SCALAR);
        const hid_t complete =
            H5Acreate2(same, "complete", H5T_STD_U8LE, space, H5P_DEFAULT, H5P_DEFAULT);
        const std::uint8_t yes = 1;
        H5Awrite(complete, H5T_STD_U8LE, &yes);
        H5Fflush(same, H5F_SCOPE_GLOBAL);
        ::raise(SIGKILL);
      }
    }
    return 96;
  }));
  BOOST_TEST((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL), "status " << status);
  BOOST_TEST(whole_version(file) == 1);
  const std::vector<std::string> names = files_in(folder.path());
  BOOST_TEST_REQUIRE(names.size() == 2U);
  const std::string left = names[0] == "d.h5" ? names[1] : names[0];
  expect_error(Errc::io, {left, "cannot open"}, [&] { const DumpReader dump(folder / left); });
}

BOOST_AUTO_TEST_CASE(a_reader_in_another_process_meets_the_old_dump_while_one_is_written) {  // D10
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  write_version(file, 1);
  DumpWriter dump(file);
  dump.experiment({{"config", "2"}});
  const int status = wait_for(start_child([&] { return whole_version(file) == 1 ? 0 : 1; }));
  BOOST_TEST((WIFEXITED(status) && WEXITSTATUS(status) == 0), "status " << status);
}

/// Files where the bytes of each stored dataset lie: from a contiguous one, or its chunks.
std::vector<std::pair<haddr_t, hsize_t>> ranges_of(const std::filesystem::path& path,
                                                   const std::string& name) {
  const h5::Lock lock;
  std::vector<std::pair<haddr_t, hsize_t>> out;
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset != HADDR_UNDEF) {
    out.emplace_back(offset, H5Dget_storage_size(dataset));
  } else {
    const hid_t space = H5Dget_space(dataset);
    hsize_t chunks = 0;
    std::array<hsize_t, H5S_MAX_RANK> at{};
    unsigned filters = 0;
    if (H5Dget_num_chunks(dataset, space, &chunks) >= 0) {
      for (hsize_t i = 0; i < chunks; ++i) {
        haddr_t address = 0;
        hsize_t size = 0;
        H5Dget_chunk_info(dataset, space, i, at.data(), &filters, &address, &size);
        out.emplace_back(address, size);
      }
    }
    H5Sclose(space);
  }
  H5Dclose(dataset);
  H5Fclose(file);
  return out;
}

BOOST_AUTO_TEST_CASE(a_damaged_byte_in_any_dataset_is_found_and_named) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter strided =
      with_layout("strided", mesh_layout({13, 3}, {3}, {Placement::strided_shard(0, 3)}));
  const Problem problem =
      Problem::make({moved("a", {60, 40}, DType::bf16, 2, 3), moved("b", {300}, DType::f32, 2, 3)});
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "[run]\nrounds = 3\n"}});
    dump.problem(problem);
    dump.plan(first_holders(problem), problem);
    dump.round(0, {1, 0.5, 0, {{1, 10, 10, "memory"}}});
    for (const Parameter& parameter : problem.parameters()) {
      write_side(dump, parameter, Role::source);
      write_side(dump, parameter, Role::destination);
    }
    write_side(dump, strided, Role::source);
    dump.stitch(Role::destination);
    dump.commit();
  }
  std::mt19937_64 random(seed());
  std::string content = testing::read_file(file);
  DumpReader(file).verify();
  int damaged = 0;
  for (const DumpEntry& entry : DumpReader(file).entries()) {
    const auto ranges = entry.stitched || entry.bytes == 0 ? decltype(ranges_of(file, "")){}
                                                           : ranges_of(file, entry.path);
    BOOST_TEST((entry.stitched || entry.bytes == 0 || !ranges.empty()), entry.path);
    for (const auto& [address, size] : ranges) {
      for (int i = 0; i < 3; ++i) {
        const std::size_t at = address + random() % size;
        std::string other = content;
        other[at] = static_cast<char>(other[at] ^ (1 << random() % 8));
        const auto copy = folder.write("damaged.h5", other);
        expect_error(Errc::io, {"'" + entry.path + "'", "damaged.h5", "is damaged"},
                     [&] { DumpReader(copy).verify(); });
        expect_error(Errc::io, {"'" + entry.path + "'"},
                     [&] { DumpReader(copy).verify(entry.path); });
        ++damaged;
      }
    }
  }
  BOOST_TEST(damaged > 100);
}

BOOST_AUTO_TEST_CASE(a_damaged_byte_anywhere_never_gives_wrong_data_in_silence) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const auto data = global_tensor("w", {50}, DType::f32);
  write_tensor(file, replicated("w", {50}, DType::f32), data);
  const std::string content = testing::read_file(file);
  std::mt19937_64 random(seed());
  int found = 0;
  for (int i = 0; i < 300; ++i) {
    std::string other = content;
    const std::size_t at = random() % other.size();
    other[at] = static_cast<char>(other[at] ^ (1 << random() % 8));
    const auto copy = folder.write("damaged.h5", other);
    try {
      const DumpReader dump(copy);
      dump.verify();
      const auto shards = dump.shards(Role::source);
      BOOST_REQUIRE_EQUAL(shards.size(), 1U);
      std::vector<std::byte> out(200);
      dump.read(shards[0], out.data());
      BOOST_TEST((out == data), "byte " << at);
    } catch (const Error&) {
      ++found;
    }
  }
  BOOST_TEST(found > 20);
}

BOOST_AUTO_TEST_CASE(eight_threads_write_and_read_eight_files) {  // D09
  const TemporaryFolder folder;
  std::vector<std::string> failures(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      try {
        const auto file = folder / ("d" + std::to_string(t) + ".h5");
        for (int round = 0; round < 12; ++round) {
          const std::string name = "w" + std::to_string(t) + "." + std::to_string(round);
          const Parameter parameter = replicated(name, {100}, DType::f32);
          const auto data = global_tensor(name, {100}, DType::f32);
          {
            DumpWriter dump(file);
            dump.experiment({{"config", name}});
            dump.shard(Role::source, 0, parameter, parameter.source.layout->compact(0),
                       data.data());
            dump.stitch(Role::source);
            dump.commit();
          }
          const DumpReader dump(file);
          dump.verify();
          std::vector<std::byte> out(400);
          dump.read(dump.shards(Role::source).at(0), out.data());
          if (out != data || dump.fact("config") != name) {
            throw Error(Errc::io, "round " + std::to_string(round) + " reads something else");
          }
          try {
            const DumpReader none(folder / ("none" + std::to_string(t)));
            throw std::runtime_error("a missing file was opened");
          } catch (const Error&) {
            // An error on one thread is no other thread's business.
          }
        }
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(t)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& failure : failures) {
    BOOST_TEST(failure == "");
  }
  BOOST_TEST(files_in(folder.path()).size() == 8U);
}

BOOST_AUTO_TEST_CASE(threads_may_share_a_writer_and_a_reader) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", mesh_layout({64, 3}, {8}, {Placement::shard(0)}));
  const auto global = global_tensor("w", parameter.shape, DType::f32);
  const auto on_threads = [](const std::function<void(Rank)>& body) {
    std::vector<std::thread> threads;
    std::vector<std::string> failures(8);
    for (Rank rank = 0; rank < 8; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (const std::exception& error) {
          failures[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const std::string& failure : failures) {
      BOOST_TEST(failure == "");
    }
  };
  {
    DumpWriter dump(file);
    on_threads([&](Rank rank) {
      const CompactShard shard = parameter.source.layout->compact(rank);
      const auto data = compact_tensor(shard, parameter.shape, DType::f32, global);
      dump.shard(Role::source, rank, parameter, shard, data.data());
    });
    dump.stitch(Role::source);
    dump.commit();
  }
  const DumpReader dump(file);
  on_threads([&](Rank rank) {
    const DumpShard shard = dump.shards(Role::source).at(static_cast<std::size_t>(rank));
    std::vector<std::byte> out(8 * 3 * 4);
    dump.read(shard, out.data());
    if (!std::equal(out.begin(), out.end(), global.begin() + rank * 96)) {
      throw Error(Errc::io, "rank " + std::to_string(rank) + " reads something else");
    }
  });
  BOOST_TEST((raw_read(file, "/source_tensors/w").bytes == global));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
