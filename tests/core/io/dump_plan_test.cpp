// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A dumped problem and plan, read back whole.

#include <algorithm>
#include <random>

#include "core/api/builtin.hpp"
#include "tests/core/io/dump_support.hpp"
#include "tests/support/random_problem.hpp"

namespace m2n {
namespace {

using namespace testing;

void write_plan(const std::filesystem::path& file, const Problem& problem, const Plan& plan) {
  DumpWriter dump(file);
  dump.problem(problem);
  dump.plan(plan, problem);
  dump.commit();
}

void require_equal(const Side& found, const Side& written) {
  BOOST_REQUIRE(*found.layout == *written.layout);
  BOOST_REQUIRE(found.buffers == written.buffers);
}

void require_equal(const Problem& found, const Problem& written) {
  BOOST_REQUIRE_EQUAL(found.parameters().size(), written.parameters().size());
  for (std::size_t i = 0; i < written.parameters().size(); ++i) {
    const Parameter& a = found.parameters()[i];
    const Parameter& b = written.parameters()[i];
    BOOST_REQUIRE_EQUAL(a.name, b.name);
    BOOST_REQUIRE(a.shape == b.shape);
    BOOST_REQUIRE_EQUAL(a.cast, b.cast);
    BOOST_REQUIRE_EQUAL(a.quantise.has_value(), b.quantise.has_value());
    if (a.quantise) {
      BOOST_REQUIRE(a.quantise->blocks == b.quantise->blocks);
      BOOST_REQUIRE_EQUAL(a.quantise->scales, b.quantise->scales);
    }
    require_equal(a.source, b.source);
    require_equal(a.destination, b.destination);
  }
}

void require_equal(const Plan& found, const Plan& written) {
  BOOST_REQUIRE_EQUAL(found.digest, written.digest);
  BOOST_REQUIRE_EQUAL(found.planner, written.planner);
  BOOST_REQUIRE_EQUAL(found.stage_count, written.stage_count);
  BOOST_REQUIRE(found.pattern_of == written.pattern_of);
  BOOST_REQUIRE(found.first_stage == written.first_stage);
  BOOST_REQUIRE_EQUAL(found.patterns.size(), written.patterns.size());
  for (std::size_t i = 0; i < written.patterns.size(); ++i) {
    BOOST_REQUIRE(found.patterns[i].boxes == written.patterns[i].boxes);
    BOOST_REQUIRE(found.patterns[i].moves == written.patterns[i].moves);
    BOOST_REQUIRE(found.patterns[i].scratch == written.patterns[i].scratch);
  }
}

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

BOOST_AUTO_TEST_CASE(problem_and_plan_of_every_planner_come_back_equal_and_run) {
  const Registries registries = builtin_registries();
  const TemporaryFolder folder;
  Dice dice(seed());
  std::size_t with_scratch = 0;
  for (int i = 0; i < 20; ++i) {
    const Problem problem = random_problem(dice);
    const Topology topology = random_topology(dice, std::max<Rank>(1, problem.world_size()));
    for (const auto& [name, entry] : registries.planners.entries()) {
      BOOST_TEST_CONTEXT("problem " << i << ", planner " << name) {
        const Plan plan = entry.factory({})->plan(problem, topology);
        const auto file = folder / "d.h5";
        write_plan(file, problem, plan);
        const DumpReader dump(file);
        const Problem found_problem = dump.problem();
        require_equal(found_problem, problem);
        const Plan found = dump.plan(found_problem);
        require_equal(found, plan);
        check_plan(found, found_problem);
        BOOST_REQUIRE_EQUAL(run_and_compare(found, found_problem), "");
        with_scratch += std::any_of(found.patterns.begin(), found.patterns.end(),
                                    [](const Pattern& p) { return !p.scratch.empty(); })
                            ? 1
                            : 0;
      }
    }
  }
  BOOST_TEST_MESSAGE(with_scratch << " plans had scratch memory");
}

BOOST_AUTO_TEST_CASE(casts_shared_buffers_and_hostile_names_come_back) {
  const Shape shape{4, 6};
  std::vector<Parameter> parameters = {moved("a/b%", shape, DType::f32, 2, 2),
                                       moved(std::string("n\0\0", 3), shape, DType::bf16, 2, 2)};
  parameters[0].destination.layout = std::make_shared<const Layout>(
      Layout::sharded(shape, DType::bf16, Mesh({2}, 2), {Placement::shard(1)}));
  parameters[0].cast = true;
  parameters[1].source.buffers = {"quote\" and \\ and \n"};
  const Problem problem = Problem::make(parameters);
  const TemporaryFolder folder;
  write_plan(folder / "d.h5", problem, first_holders(problem));
  const DumpReader dump(folder / "d.h5");
  require_equal(dump.problem(), problem);
  require_equal(dump.plan(problem), first_holders(problem));
}

BOOST_AUTO_TEST_CASE(how_weights_are_quantised_comes_back_and_differs) {
  const std::string holder("s\0", 2);  // its trailing NUL is lost in padding alone
  const auto problem = [&](Index block, const std::string& scales) {
    Parameter weight = moved("w", {4, 6}, DType::bf16, 2, 2);
    weight.destination.layout = std::make_shared<const Layout>(
        Layout::sharded({4, 6}, DType::f8_e4m3, Mesh({2}, 2), {Placement::shard(1)}));
    weight.quantise = Quantise{{2, block}, scales};
    return Problem::make(
        {moved(holder, {2, 2}, DType::f32, 2, 2), weight, moved("t", {2, 2}, DType::f32, 2, 2)});
  };
  const TemporaryFolder folder;
  const Problem written = problem(3, holder);
  write_plan(folder / "d.h5", written, first_holders(written));
  const DumpReader dump(folder / "d.h5");
  require_equal(dump.problem(), written);
  require_equal(dump.plan(written), first_holders(written));
  BOOST_TEST(first_holders(written).digest != first_holders(problem(4, holder)).digest);
  for (const auto& other : {problem(4, holder), problem(3, "t")}) {
    write_plan(folder / "e.h5", other, first_holders(other));
    BOOST_TEST(*DumpReader(folder / "e.h5").fact("problem_digest") != *dump.fact("problem_digest"));
    std::filesystem::remove(folder / "e.h5");
  }
}

BOOST_AUTO_TEST_CASE(a_dump_without_problem_or_plan_says_so) {
  const TemporaryFolder folder;
  const Problem problem = Problem::make({moved("w", {4, 4}, DType::f32, 2, 2)});
  write_tensor(folder / "shards.h5", replicated("w", {4}, DType::u8), std::vector<std::byte>(4));
  const DumpReader shards(folder / "shards.h5");
  expect_error(Errc::io, {"shards.h5", "no problem"}, [&] { shards.problem(); });
  expect_error(Errc::io, {"shards.h5", "no plan"}, [&] { shards.plan(problem); });
  BOOST_TEST(shards.digests().empty());

  write_plan(folder / "d.h5", problem, first_holders(problem));
  auto dump = std::make_unique<DumpReader>(folder / "d.h5");
  const Problem other = Problem::make({moved("v", {4, 4}, DType::f32, 2, 2)});
  expect_error(Errc::io, {"d.h5", "but says that it is"}, [&] { dump->plan(other); });
  const Problem smaller = Problem::make({});
  expect_error(Errc::io, {"d.h5", "layout"}, [&] { dump->plan(smaller); });
  dump.reset();

  // What version 1 wrote: regions to look at, and no patterns.
  {
    const h5::Lock lock;
    const hid_t file = H5Fopen((folder / "d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    H5Ldelete(file, "/plan/patterns", H5P_DEFAULT);
    const hid_t version = H5Aopen(file, "schema_version", H5P_DEFAULT);
    const std::uint32_t one = 1;
    H5Awrite(version, H5T_NATIVE_UINT32, &one);
    H5Aclose(version);
    H5Fclose(file);
  }
  const DumpReader old(folder / "d.h5");
  BOOST_TEST(old.schema_version() == 1U);
  require_equal(old.problem(), problem);
  expect_error(Errc::io, {"schema version 1", "not run again"}, [&] { old.plan(problem); });
}

BOOST_AUTO_TEST_CASE(a_pattern_of_a_strange_geometry_is_not_written) {
  const Problem problem = Problem::make({moved("w", {4, 4}, DType::f32, 2, 2)});
  const Plan plan = first_holders(Problem::make({moved("w", {4, 4}, DType::f32, 2, 1)}));
  const TemporaryFolder folder;
  DumpWriter dump(folder / "d.h5");
  dump.problem(problem);
  expect_error(Errc::bad_plan, {"geometry"}, [&] { dump.plan(plan, problem); });
}

/// Overwrites one byte of a dataset and makes its checksum right again, as no accident would.
void tamper(const std::filesystem::path& path, const std::string& name, std::size_t at,
            std::byte mask) {
  const h5::Lock lock;
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  const hid_t type = H5Dget_type(dataset);
  const hid_t space = H5Dget_space(dataset);
  std::vector<std::byte> bytes(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)) *
                               H5Tget_size(type));
  H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data());
  bytes[at % bytes.size()] ^= mask;
  H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data());
  h5::Checksum checksum;
  checksum.add(bytes.data(), bytes.size());
  const std::uint64_t value = checksum.value();
  const hid_t attribute = H5Aopen(dataset, "checksum", H5P_DEFAULT);
  H5Awrite(attribute, H5T_NATIVE_UINT64, &value);
  H5Aclose(attribute);
  H5Sclose(space);
  H5Tclose(type);
  H5Dclose(dataset);
  H5Fclose(file);
}

BOOST_AUTO_TEST_CASE(a_plan_that_was_tampered_with_is_refused_and_never_a_crash) {
  const Registries registries = builtin_registries();
  const Problem problem = Problem::make(
      {moved("a", {6, 4}, DType::bf16, 2, 3),
       with_layout("s", mesh_layout({13, 3}, {3}, {Placement::strided_shard(0, 3)}))});
  const TemporaryFolder folder;
  const Plan plan = registries.planners.create("relay", {{}})
                        ->plan(problem, Topology::single_island(problem.world_size()));
  write_plan(folder / "whole.h5", problem, plan);
  std::vector<std::string> columns;
  for (const DumpEntry& entry : DumpReader(folder / "whole.h5").entries()) {
    const bool used = entry.path.starts_with("/plan/patterns/") ||
                      entry.path.starts_with("/layouts/") || entry.path == "/params/path" ||
                      entry.path == "/params/cast" || entry.path.ends_with("_layout") ||
                      entry.path.ends_with("_buffers");
    if (used && entry.bytes > 0) {
      columns.push_back(entry.path);
    }
  }
  BOOST_TEST(columns.size() >= 20U);
  std::mt19937_64 random(seed());
  int found = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string& column = columns[static_cast<std::size_t>(i) % columns.size()];
    const auto file = folder / "d.h5";
    std::filesystem::copy_file(folder / "whole.h5", file,
                               std::filesystem::copy_options::overwrite_existing);
    tamper(file, column, random(), static_cast<std::byte>(1 << random() % 8));
    try {
      const DumpReader dump(file);
      const Problem read = dump.problem();
      require_equal(dump.plan(read), plan);
      require_equal(read, problem);
      BOOST_TEST_MESSAGE(column << ": a change that means nothing");
    } catch (const Error&) {
      ++found;
    }
  }
  BOOST_TEST(found > 280, found);
}

BOOST_AUTO_TEST_CASE(phases_and_digests_are_kept) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  {
    DumpWriter dump(file);
    dump.phase({"connect", 1, 0, 0.5, 1.5});
    dump.phase({"round", 0, 7, 1.5, 2.25});
    dump.digest({Role::destination, 3, 1, 11});
    dump.digest({Role::source, 0, 0, ~std::uint64_t{0}});
    dump.round(0, {7, 0.25, 0, {{1, 100, 0, "memory", 0.125, 0.1875}}});
    dump.commit();
  }
  using Strings = std::vector<std::string>;
  BOOST_TEST((raw_texts(file, "/phases/name") == Strings{"connect", "round"}));
  BOOST_TEST((raw_column<std::int32_t>(file, "/phases/rank") == std::vector<std::int32_t>{1, 0}));
  BOOST_TEST(
      (raw_column<std::uint64_t>(file, "/phases/version") == std::vector<std::uint64_t>{0, 7}));
  BOOST_TEST((raw_column<double>(file, "/phases/start") == std::vector<double>{0.5, 1.5}));
  BOOST_TEST((raw_column<double>(file, "/phases/end") == std::vector<double>{1.5, 2.25}));
  BOOST_TEST((raw_column<double>(file, "/rounds/peers/start") == std::vector<double>{0.125}));
  BOOST_TEST((raw_column<double>(file, "/rounds/peers/end") == std::vector<double>{0.1875}));
  const DumpReader dump(file);
  BOOST_TEST((dump.digests() == std::vector<DumpDigest>{{Role::source, 0, 0, ~std::uint64_t{0}},
                                                        {Role::destination, 3, 1, 11}}));
  dump.verify();
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
