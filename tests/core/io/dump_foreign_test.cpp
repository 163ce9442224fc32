// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <cstdlib>
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

/// A dump made by another program: plain HDF5 calls, default bounds, texts of variable length.
class ForeignDump {
 public:
  explicit ForeignDump(const std::filesystem::path& path) {
    file_ = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  }
  ForeignDump(const ForeignDump&) = delete;
  ForeignDump& operator=(const ForeignDump&) = delete;
  ~ForeignDump() { H5Fclose(file_); }

  void root(int version, bool complete, const char* format = "m2n dump") {
    text(file_, "format", format);
    number(file_, "schema_version", version);
    if (complete) {
      number(file_, "complete", 1);
    }
  }
  void shard(const char* name, hid_t type, const std::vector<hsize_t>& shape, const void* data,
             const char* dtype, const std::vector<long long>& global_shape,
             const std::vector<long long>& box) {
    const hid_t links = H5Pcreate(H5P_LINK_CREATE);
    H5Pset_create_intermediate_group(links, 1);
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t dataset = H5Dcreate2(file_, name, type, space, links, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data);
    if (dtype != nullptr) {
      text(dataset, "dtype", dtype);
    }
    list(dataset, "global_shape", {static_cast<hsize_t>(global_shape.size())}, global_shape);
    list(dataset, "box", {static_cast<hsize_t>(box.size() / 2), 2}, box);
    H5Dclose(dataset);
    H5Sclose(space);
    H5Pclose(links);
  }

 private:
  static void text(hid_t object, const char* name, const char* value) {
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, type, static_cast<const void*>(&value));
    H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(type);
  }
  static void number(hid_t object, const char* name, int value) {
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute =
        H5Acreate2(object, name, H5T_NATIVE_INT, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, H5T_NATIVE_INT, &value);
    H5Aclose(attribute);
    H5Sclose(space);
  }
  static void list(hid_t object, const char* name, const std::vector<hsize_t>& shape,
                   const std::vector<long long>& values) {
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t attribute =
        H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, H5T_NATIVE_LLONG, values.data());
    H5Aclose(attribute);
    H5Sclose(space);
  }

  hid_t file_;
};

struct ForeignCase {
  const char* why;
  hid_t (*type)();
  std::size_t size;
  const char* dtype;  ///< As an attribute; none where HDF5's type says it.
  DType expected;
};
std::ostream& operator<<(std::ostream& os, const ForeignCase& c) { return os << c.why; }
const std::vector<ForeignCase> kForeignCases = {
    {"f32 by its type alone", [] { return H5T_IEEE_F32LE; }, 4, nullptr, DType::f32},
    {"f64", [] { return H5T_IEEE_F64LE; }, 8, "f64", DType::f64},
    {"bf16 as bits", [] { return H5T_STD_U16LE; }, 2, "bf16", DType::bf16},
    {"u16 by its type alone", [] { return H5T_STD_U16LE; }, 2, nullptr, DType::u16},
    {"fp8 as bits", [] { return H5T_STD_U8LE; }, 1, "f8_e5m2", DType::f8_e5m2},
    {"bool as bytes", [] { return H5T_STD_U8LE; }, 1, "bool", DType::boolean},
    {"i8", [] { return H5T_STD_I8LE; }, 1, "i8", DType::i8},
    {"i16", [] { return H5T_STD_I16LE; }, 2, "i16", DType::i16},
    {"i32", [] { return H5T_STD_I32LE; }, 4, nullptr, DType::i32},
    {"i64", [] { return H5T_STD_I64LE; }, 8, nullptr, DType::i64},
    {"u64", [] { return H5T_STD_U64LE; }, 8, nullptr, DType::u64},
};

BOOST_DATA_TEST_CASE(a_shard_written_by_plain_hdf5_is_read_back, bdata::make(kForeignCases), c) {
  const TemporaryFolder folder;
  const auto file = folder / "foreign.h5";
  std::vector<std::byte> data(6 * c.size);
  std::mt19937_64 random(seed());
  for (std::byte& byte : data) {
    byte = static_cast<std::byte>(random());
  }
  {
    ForeignDump foreign(file);
    foreign.root(1, true);
    foreign.shard("/shards/destination/7/w", c.type(), {2, 3}, data.data(), c.dtype, {4, 3},
                  {2, 4, 0, 3});
  }
  const DumpReader dump(file);
  const auto shards = dump.shards(Role::destination);
  BOOST_REQUIRE_EQUAL(shards.size(), 1U);
  BOOST_TEST(shards[0].rank == 7);
  BOOST_TEST((shards[0].dtype == c.expected));
  BOOST_TEST((shards[0].shape == Shape{4, 3}));
  BOOST_TEST((shards[0].compact.pieces.at(0).box == Box{Dims{2, 0}, Dims{4, 3}}));
  std::vector<std::byte> read(data.size());
  dump.read(shards[0], read.data());
  BOOST_TEST((read == data));
  expect_error(Errc::io, {"'/shards/destination/7/w'", "no checksum"}, [&] { dump.verify(); });
}

struct BadShard {
  const char* why;
  hid_t (*type)();
  const char* dtype;
  std::vector<long long> global_shape;
  std::vector<long long> box;
  std::vector<std::string> parts;
};
std::ostream& operator<<(std::ostream& os, const BadShard& c) { return os << c.why; }
const std::vector<BadShard> kBadShards = {
    {"floats are no bf16", [] { return H5T_IEEE_F32LE; }, "bf16", {4, 3}, {2, 4, 0, 3}, {"bf16"}},
    {"a dtype that nobody knows", [] { return H5T_STD_U8LE; }, "f7", {4, 3}, {2, 4, 0, 3}, {"f7"}},
    {"a packed dtype", [] { return H5T_STD_U8LE; }, "f4", {4, 3}, {2, 4, 0, 3}, {"f4"}},
    {"a box outside", [] { return H5T_STD_U8LE; }, "u8", {4, 3}, {3, 5, 0, 3}, {"[3:5, 0:3]"}},
    {"a box of another size", [] { return H5T_STD_U8LE; }, "u8", {4, 3}, {1, 4, 0, 3}, {"[2, 3]"}},
    {"a box of another rank", [] { return H5T_STD_U8LE; }, "u8", {4, 3}, {2, 4}, {"rank"}},
    {"a shape that overflows",
     [] { return H5T_STD_U8LE; },
     "u8",
     {1LL << 62, 8},
     {2, 4, 0, 3},
     {"element count"}},
};

BOOST_DATA_TEST_CASE(a_shard_that_contradicts_itself_is_refused, bdata::make(kBadShards), c) {
  const TemporaryFolder folder;
  const auto file = folder / "foreign.h5";
  const std::vector<double> data(6);
  {
    ForeignDump foreign(file);
    foreign.root(1, true);
    foreign.shard("/shards/source/0/w", c.type(), {2, 3}, data.data(), c.dtype, c.global_shape,
                  c.box);
  }
  const DumpReader dump(file);
  try {
    dump.shards(Role::source);
    BOOST_ERROR("nothing was thrown");
  } catch (const Error& error) {
    for (const std::string& part : c.parts) {
      BOOST_TEST(contains(error.what(), part), error.what());
    }
  }
}

BOOST_AUTO_TEST_CASE(what_is_no_complete_dump_is_refused_with_its_own_words) {
  const TemporaryFolder folder;
  const auto open = [](const std::filesystem::path& path) { const DumpReader dump(path); };
  expect_error(Errc::io, {"none.h5", "no such file"}, [&] { open(folder / "none.h5"); });
  expect_error(Errc::io, {"not a regular file"}, [&] { open(folder.path()); });
  expect_error(Errc::io, {"not an HDF5 file"},
               [&] { open(folder.write("text.h5", "hello, this is no dump")); });
  expect_error(Errc::io, {"not an HDF5 file"}, [&] { open(folder.write("empty.h5", "")); });
  { ForeignDump foreign(folder / "other.h5"); }
  expect_error(Errc::io, {"not a dump of m2n"}, [&] { open(folder / "other.h5"); });
  {
    ForeignDump foreign(folder / "format.h5");
    foreign.root(1, true, "another dump");
  }
  expect_error(Errc::io, {"not a dump of m2n"}, [&] { open(folder / "format.h5"); });
  {
    ForeignDump foreign(folder / "torn.h5");
    foreign.root(1, false);
  }
  expect_error(Errc::io, {"torn.h5", "never completed"}, [&] { open(folder / "torn.h5"); });
  {
    ForeignDump foreign(folder / "newer.h5");
    foreign.root(static_cast<int>(kDumpSchemaVersion) + 1, true);
  }
  expect_error(Errc::io, {"schema version " + std::to_string(kDumpSchemaVersion + 1), "reads 1 to"},
               [&] { open(folder / "newer.h5"); });

  write_tensor(folder / "whole.h5", replicated("w", {64}, DType::f32),
               global_tensor("w", {64}, DType::f32));
  const std::string whole = testing::read_file(folder / "whole.h5");
  expect_error(Errc::io, {"cut.h5", "truncated"},
               [&] { open(folder.write("cut.h5", whole.substr(0, whole.size() - 1))); });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
