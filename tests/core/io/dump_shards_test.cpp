// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <fstream>
#include <random>

#include "core/api/builtin.hpp"
#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace utf = boost::unit_test;
using namespace testing;

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

BOOST_DATA_TEST_CASE(shards_stitch_into_the_global_tensor, bdata::make(layout_cases()), c) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", c.make());
  {
    DumpWriter dump(file);
    write_side(dump, parameter, Role::source);
    write_side(dump, parameter, Role::destination);
    dump.stitch(Role::source);
    dump.stitch(Role::destination);
    dump.commit();
  }
  std::filesystem::rename(file, folder / "renamed.h5");  // the dump refers to itself by no name
  const DumpReader dump(folder / "renamed.h5");
  dump.verify();
  const auto entries = dump.entries();
  for (const std::string path : {"/tensors/w", "/source_tensors/w"}) {
    const bool stitched = std::any_of(entries.begin(), entries.end(), [&](const DumpEntry& entry) {
      return entry.path == path && entry.stitched;
    });
    BOOST_TEST(stitched == c.whole);
    if (c.whole) {
      const Raw raw = raw_read(folder / "renamed.h5", path);
      BOOST_TEST(
          (raw.shape == std::vector<hsize_t>(parameter.shape.begin(), parameter.shape.end())));
      BOOST_TEST((raw.bytes == global_tensor("w", parameter.shape, DType::f32)));
    }
  }
}

BOOST_AUTO_TEST_CASE(shards_of_names_that_are_escaped_stitch) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Layout rows = mesh_layout({8, 3}, {4}, {Placement::shard(0)});
  const std::vector<std::string> names = {"a/b", "%b", "100%", "%%", "%d%s", ".w", "größe"};
  {
    DumpWriter dump(file);
    for (const std::string& name : names) {
      write_side(dump, with_layout(name, rows), Role::destination);
    }
    dump.stitch(Role::destination);
    dump.commit();
  }
  for (const std::string& name : names) {
    BOOST_TEST((raw_read(file, "/tensors/" + dump_path_of(name)).bytes ==
                global_tensor(name, {8, 3}, DType::f32)),
               name);
  }
}

BOOST_DATA_TEST_CASE(any_part_of_any_piece_is_read_back, bdata::make(layout_cases()), c) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", c.make());
  {
    DumpWriter dump(file);
    write_side(dump, parameter, Role::source);
    dump.commit();
  }
  std::mt19937_64 random(seed());
  auto global = global_tensor("w", parameter.shape, DType::f32);
  const DumpReader dump(file);
  std::size_t pieces = 0;
  for (const DumpShard& shard : dump.shards(Role::source)) {
    const CompactShard expected = parameter.source.layout->compact(shard.rank);
    BOOST_TEST((shard.compact.local_shape == expected.local_shape));
    BOOST_REQUIRE_EQUAL(shard.compact.pieces.size(), expected.pieces.size());
    for (std::size_t i = 0; i < expected.pieces.size(); ++i, ++pieces) {
      BOOST_TEST((shard.compact.pieces[i].box == expected.pieces[i].box));
      for (int round = 0; round < 20; ++round) {
        Box inner;
        for (std::size_t d = 0; d < parameter.shape.size(); ++d) {
          const Interval whole = expected.pieces[i].box[d];
          const auto size = static_cast<std::uint64_t>(whole.size());
          const Index lo = whole.begin + static_cast<Index>(random() % size);
          inner.lo.push_back(lo);
          inner.hi.push_back(
              lo + 1 + static_cast<Index>(random() % static_cast<std::uint64_t>(whole.end - lo)));
        }
        const Shape extents = inner.extents();
        Shape roomy = extents;  // strides that are not compact in half of the rounds
        if (round % 2 == 1) {
          for (Index& extent : roomy) {
            extent += 2;
          }
        }
        const Strides strides = row_major(roomy);
        const auto room = static_cast<std::size_t>(element_count(roomy)) * 4;
        std::vector<std::byte> want(room);
        std::vector<std::byte> got(room);
        copy_box(parameter.shape, inner, 4, global.data(), want.data(), 0, strides, true);
        dump.read(shard, i, inner, got.data(), strides);
        BOOST_REQUIRE(got == want);
      }
    }
  }
  BOOST_TEST(pieces > 0U);
}

BOOST_DATA_TEST_CASE(values_come_back_from_a_dump, bdata::make(layout_cases()), c) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Parameter parameter = with_layout("w", c.make());
  {
    DumpWriter dump(file);
    write_side(dump, parameter, Role::destination);
    dump.commit();
  }
  const Registries registries = builtin_registries();
  const auto values = registries.values.create("hdf5", {{{"path", file.string()}}, {}});
  BOOST_TEST(values->name() == "hdf5");
  BOOST_TEST((values->catalogue() == Catalogue{{"w", DType::f32, parameter.shape}}));
  const Box whole = Box::whole(parameter.shape);
  std::vector<std::byte> got(static_cast<std::size_t>(whole.volume()) * 4);
  const auto read = [&] { values->read("w", whole, got.data(), row_major(parameter.shape)); };
  if (c.whole) {
    read();
    BOOST_TEST((got == global_tensor("w", parameter.shape, DType::f32)));
  } else {
    expect_error(Errc::bad_argument, {"'w'", "[2:4, 3:4]"}, read);
  }
  expect_error(Errc::bad_argument, {"'x'"},
               [&] { values->read("x", whole, got.data(), row_major(parameter.shape)); });
}

BOOST_AUTO_TEST_CASE(values_check_what_they_read_and_refuse_unknown_options) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  write_tensor(file, replicated("w", {100}, DType::u8), global_tensor("w", {100}, DType::u8));
  const Raw raw = raw_read(file, "/shards/source/0/w");
  {
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(static_cast<std::streamoff>(raw.offset + 42));
    damaged.put(static_cast<char>(~std::to_integer<int>(raw.bytes[42])));
  }
  const Registries registries = builtin_registries();
  const auto make = [&](const Options& given) {
    Options options = given;
    options["path"] = file.string();
    return registries.values.create("hdf5", {std::move(options), {}});
  };
  std::vector<std::byte> out(100);
  const auto read = [&](const TensorValues& values) {
    values.read("w", Box{Dims{0}, Dims{100}}, out.data(), Strides{1});
  };
  expect_error(Errc::io, {"/shards/source/0/w", "damaged"}, [&] {
    read(*make({{"side", "source"}}));
  });
  read(*make({{"side", "source"}, {"verify", "no"}}));
  BOOST_TEST((out[41] == raw.bytes[41] && out[42] == ~raw.bytes[42]));
  expect_error(Errc::bad_argument, {"no shards of the destination"}, [&] { make({}); });
  expect_error(Errc::usage, {"'sid'", "side"}, [&] { make({{"sid", "source"}}); });
  expect_error(Errc::usage, {"'left'", "destination, source"}, [&] { make({{"side", "left"}}); });
  expect_error(Errc::usage, {"path"}, [&] { registries.values.create("hdf5", {}); });
}

BOOST_AUTO_TEST_CASE(a_shard_of_thousands_of_boxes_keeps_them_all) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  // 5000 boxes on each rank: 80 bytes a box are far more than an attribute holds.
  const Parameter parameter =
      with_layout("w", mesh_layout({10001, 2}, {2}, {Placement::strided_shard(0, 5000)}));
  {
    DumpWriter dump(file);
    write_side(dump, parameter, Role::destination);
    dump.stitch(Role::destination);
    dump.commit();
  }
  const DumpReader dump(file);
  for (const DumpShard& shard : dump.shards(Role::destination)) {
    BOOST_TEST((shard.compact.pieces == parameter.destination.layout->compact(shard.rank).pieces));
  }
  BOOST_TEST((raw_read(file, "/tensors/w").bytes == global_tensor("w", {10001, 2}, DType::f32)));
  dump.verify();
}

BOOST_AUTO_TEST_CASE(chunks_stay_small_whatever_the_tensor_and_shards_are_contiguous) {  // D11, D14
  const TemporaryFolder folder;
  const Shape shape{3, 1 << 20, 5};  // a row alone is above the cap
  const Parameter parameter = replicated("w", shape, DType::u8);
  const auto data = global_tensor("w", shape, DType::u8);
  write_tensor(folder / "plain.h5", parameter, data);
  write_tensor(folder / "packed.h5", parameter, data, {.deflate_level = 1});
  const Raw plain = raw_read(folder / "plain.h5", "/shards/source/0/w");
  BOOST_TEST((plain.layout == H5D_CONTIGUOUS));
  const Raw packed = raw_read(folder / "packed.h5", "/shards/source/0/w");
  BOOST_TEST((packed.layout == H5D_CHUNKED));
  std::uint64_t chunk = 1;
  for (const hsize_t extent : packed.chunk) {
    chunk *= extent;
  }
  BOOST_TEST(chunk <= h5::kLargestChunkBytes);
  BOOST_TEST(chunk > h5::kLargestChunkBytes / 4);
  BOOST_TEST((plain.bytes == data));
  BOOST_TEST((packed.bytes == data));
  DumpReader(folder / "packed.h5").verify();
  expect_error(Errc::bad_argument, {"deflate_level"},
               [&] { DumpWriter dump(folder / "x.h5", {.deflate_level = 10}); });
}

std::uint64_t bytes_read_by_this_process() {
  std::ifstream io("/proc/self/io");
  std::string key;
  std::uint64_t value = 0;
  io >> key >> value;
  return key == "rchar:" ? value : 0;
}

BOOST_AUTO_TEST_CASE(reading_a_part_touches_only_its_bytes,  // D14
                     *utf::precondition([](utf::test_unit_id) {
                       return boost::test_tools::assertion_result(bytes_read_by_this_process() > 0);
                     })) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Shape shape{4096, 4096};
  write_tensor(file, replicated("w", shape, DType::u8), global_tensor("w", shape, DType::u8));
  const std::uint64_t before = bytes_read_by_this_process();
  const DumpReader dump(file);
  const auto shards = dump.shards(Role::source);
  std::vector<std::byte> row(4096);
  dump.read(shards.at(0), 0, {Dims{1000, 0}, Dims{1001, 4096}}, row.data(), {4096, 1});
  const std::uint64_t used = bytes_read_by_this_process() - before;
  BOOST_TEST(used < 200000U);  // the row, and the headers on the way to it
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
