// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Dumps of several files: one that describes and stitches, and one a rank.

#include <sys/wait.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <csignal>
#include <random>

#include "core/api/builtin.hpp"
#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using namespace testing;

/// The destination's shards of one rank, as that rank's process would write them.
void write_part(const std::filesystem::path& file, const std::string& run_id, Rank rank,
                const std::vector<Parameter>& parameters) {
  DumpWriter part(file.parent_path() / dump_part_name(file, run_id, rank),
                  {.deflate_level = 0, .run_id = run_id});
  for (const Parameter& parameter : parameters) {
    const Layout& layout = *parameter.destination.layout;
    const auto global = global_tensor(parameter.name, parameter.shape, layout.dtype());
    const CompactShard shard = layout.compact(rank);
    const auto data = compact_tensor(shard, parameter.shape, layout.dtype(), global);
    part.shard(Role::destination, rank, parameter, shard, data.data());
  }
  part.commit();
}

/// What rank 0 writes when the parts are there.
void write_main(const std::filesystem::path& file, const std::string& run_id,
                const std::vector<Parameter>& parameters) {
  DumpWriter dump(file, {.deflate_level = 0, .run_id = run_id});
  for (const Parameter& parameter : parameters) {
    for (const Rank rank : parameter.destination.layout->ranks()) {
      dump.shard_in_part(dump_part_name(file, run_id, rank), Role::destination, rank, parameter,
                         parameter.destination.layout->compact(rank));
    }
  }
  dump.stitch(Role::destination);
  dump.commit();
}

void write_all(const std::filesystem::path& file, const std::string& run_id,
               const std::vector<Parameter>& parameters) {
  for (const Rank rank : parameters.front().destination.layout->ranks()) {
    write_part(file, run_id, rank, parameters);
  }
  write_main(file, run_id, parameters);
}

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)
BOOST_AUTO_TEST_SUITE(parts)

BOOST_DATA_TEST_CASE(shards_of_several_files_stitch_into_the_global_tensor,
                     bdata::make(layout_cases()), c) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "here");
  const Parameter parameter = with_layout("w", c.make());
  write_all(folder / "here" / "d.h5", "r1", {parameter});
  // Names are relative: the folder may go anywhere.
  std::filesystem::rename(folder / "here", folder / "there");
  const auto file = folder / "there" / "d.h5";
  const DumpReader dump(file);
  dump.verify();
  auto global = global_tensor("w", parameter.shape, DType::f32);
  for (const DumpShard& shard : dump.shards(Role::destination)) {
    const CompactShard expected = parameter.destination.layout->compact(shard.rank);
    BOOST_TEST((shard.compact.pieces == expected.pieces));
    std::vector<std::byte> out(static_cast<std::size_t>(element_count(expected.local_shape)) * 4);
    dump.read(shard, out.data());
    BOOST_TEST((out == compact_tensor(expected, parameter.shape, DType::f32, global)));
  }
  BOOST_TEST(dump.has("/tensors/w") == c.whole);
  if (c.whole) {
    const Raw raw = raw_read(file, "/tensors/w");
    BOOST_TEST((raw.shape == std::vector<hsize_t>(parameter.shape.begin(), parameter.shape.end())));
    BOOST_TEST((raw.bytes == global));
    const auto values = builtin_registries().values.create("hdf5", {{{"path", file.string()}}, {}});
    std::vector<std::byte> got(global.size());
    values->read("w", Box::whole(parameter.shape), got.data(), row_major(parameter.shape));
    BOOST_TEST((got == global));
  }
}

BOOST_AUTO_TEST_CASE(processes_write_their_parts_at_once) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<Parameter> parameters;
  for (int i = 0; i < 5; ++i) {
    parameters.push_back(with_layout("w" + std::to_string(i),
                                     mesh_layout({40 + i, 30}, {4}, {Placement::shard(0)})));
  }
  std::vector<pid_t> children;
  for (Rank rank = 0; rank < 4; ++rank) {
    children.push_back(start_child([&] {
      write_part(file, "r1", rank, parameters);
      return 0;
    }));
  }
  for (const pid_t child : children) {
    const int status = wait_for(child);
    BOOST_TEST((WIFEXITED(status) && WEXITSTATUS(status) == 0), "status " << status);
  }
  write_main(file, "r1", parameters);
  for (const Parameter& parameter : parameters) {
    BOOST_TEST((raw_read(file, "/tensors/" + parameter.name).bytes ==
                global_tensor(parameter.name, parameter.shape, DType::f32)));
  }
  BOOST_TEST(files_in(folder.path()).size() == 5U);
}

BOOST_AUTO_TEST_CASE(names_that_look_like_formats_are_names) {
  const TemporaryFolder folder;
  const Parameter parameter = with_layout("%b", mesh_layout({8, 3}, {4}, {Placement::shard(0)}));
  const auto file = folder / "50%%b %d.h5";
  write_all(file, "r%b", {parameter});
  BOOST_TEST((raw_read(file, "/tensors/" + dump_path_of("%b")).bytes ==
              global_tensor("%b", parameter.shape, DType::f32)));
}

BOOST_AUTO_TEST_CASE(a_part_that_is_missing_unfinished_or_of_another_run_is_named) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const std::vector<Parameter> parameters = {
      with_layout("w", mesh_layout({8, 3}, {2}, {Placement::shard(0)}))};
  const std::string part = dump_part_name(file, "r1", 1);
  write_part(file, "r1", 0, parameters);
  expect_error(Errc::io, {"d.h5", part, "no such file"},
               [&] { write_main(file, "r1", parameters); });
  BOOST_TEST(!std::filesystem::exists(file));
  write_part(file, "r2", 1, parameters);
  std::filesystem::rename(folder / dump_part_name(file, "r2", 1), folder / part);
  expect_error(Errc::io, {part, "another run"}, [&] { write_main(file, "r1", parameters); });
  write_part(file, "r1", 1, parameters);
  write_main(file, "r1", parameters);
  DumpReader(file).verify();

  const std::string whole = read_file(folder / part);
  folder.write(part, whole.substr(0, whole.size() / 2));
  expect_error(Errc::io, {"d.h5", part, "truncated"}, [&] { const DumpReader dump(file); });
  write_part(file, "r2", 1, parameters);
  std::filesystem::rename(folder / dump_part_name(file, "r2", 1), folder / part);
  expect_error(Errc::io, {"d.h5", part, "another run"}, [&] { const DumpReader dump(file); });
  std::filesystem::remove(folder / part);
  expect_error(Errc::io, {"d.h5", part, "no such file"}, [&] { const DumpReader dump(file); });

  DumpWriter dump(folder / "e.h5");
  expect_error(Errc::bad_argument, {"run_id"}, [&] {
    dump.shard_in_part("p.h5", Role::source, 0, parameters[0],
                       parameters[0].source.layout->compact(0));
  });
}

BOOST_AUTO_TEST_CASE(a_damaged_byte_in_a_part_names_the_part) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", mesh_layout({8, 3}, {2}, {Placement::shard(0)}));
  write_all(file, "r1", {parameter});
  const std::string part = dump_part_name(file, "r1", 1);
  const Raw raw = raw_read(folder / part, "/shards/destination/1/w");
  std::string content = read_file(folder / part);
  content[static_cast<std::size_t>(raw.offset) + 5] ^= 1;
  folder.write(part, content);
  expect_error(Errc::io, {"'/shards/destination/1/w'", part, "is damaged"},
               [&] { DumpReader(file).verify(); });
}

BOOST_AUTO_TEST_CASE(a_new_dump_takes_the_parts_of_the_old_one_away) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", mesh_layout({8, 3}, {2}, {Placement::shard(0)}));
  write_all(file, "r1", {parameter});
  folder.write("d.r1.rank-7.h5", "somebody else's");
  {  // without commit() nothing changes
    write_part(file, "r2", 0, {parameter});
    DumpWriter dump(file, {.deflate_level = 0, .run_id = "r2"});
    dump.shard_in_part(dump_part_name(file, "r2", 0), Role::destination, 0, parameter,
                       parameter.destination.layout->compact(0));
  }
  DumpReader(file).verify();
  write_all(file, "r2", {parameter});
  const std::vector<std::string> expected = {"d.h5", "d.r1.rank-7.h5", "d.r2.rank-0.h5",
                                             "d.r2.rank-1.h5"};
  BOOST_TEST((files_in(folder.path()) == expected));
  write_tensor(file, replicated("w", {4}, DType::u8), std::vector<std::byte>(4));
  BOOST_TEST((files_in(folder.path()) == std::vector<std::string>{"d.h5", "d.r1.rank-7.h5"}));
}

BOOST_AUTO_TEST_CASE(
    a_writer_of_parts_killed_at_any_point_leaves_the_old_or_a_new_dump_whole) {  // D08
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<Parameter> parameters;
  for (int i = 0; i < 5; ++i) {
    parameters.push_back(
        with_layout("w" + std::to_string(i), mesh_layout({400, 30}, {3}, {Placement::shard(0)})));
  }
  const auto run_id = [](int version) { return "v" + std::to_string(version); };
  const auto begin = std::chrono::steady_clock::now();
  write_all(file, run_id(1), parameters);
  const auto span = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::steady_clock::now() - begin);
  std::mt19937_64 random(seed());
  int current = 1;
  for (int child_number = 0; child_number < 10; ++child_number) {
    const std::chrono::nanoseconds delay(
        1 + random() % static_cast<std::uint64_t>(span.count() * 3 / 2 + 1));
    const int status = wait_for(start_child([&] {
      if (!die_after(delay)) {
        return 97;
      }
      for (int version = current + 1;; ++version) {
        write_all(file, run_id(version), parameters);
      }
    }));
    BOOST_TEST((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL), "status " << status);
    const DumpReader dump(file);  // every part of its run is there
    dump.verify();
    BOOST_TEST(dump.shards(Role::destination).size() == 15U);
    const int found = std::stoi(dump.fact("run_id").value().substr(1));
    BOOST_TEST(found >= current);
    current = found;
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
