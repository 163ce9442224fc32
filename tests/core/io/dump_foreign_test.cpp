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

boost::test_tools::assertion_result has_h5py(utf::test_unit_id) {
  boost::test_tools::assertion_result result(
      std::system("python3 -c 'import h5py, numpy' 2>/dev/null") == 0);
  result.message() << "python3 has no h5py";
  return result;
}

BOOST_AUTO_TEST_CASE(h5py_reads_a_dump_and_writes_one, *utf::precondition(has_h5py)) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Shape shape{11, 13};
  const auto layout = [&](DType dtype) {
    return Layout::sharded(shape, dtype, Mesh({2, 3}, 0),
                           {Placement::strided_shard(0, 3), Placement::shard(1)});
  };
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "größe"}});
    std::vector<Parameter> parameters;
    for (const auto [dtype] : byte_sized()) {
      parameters.push_back(with_layout(std::string(to_string(dtype)), layout(dtype)));
      std::ofstream(folder / std::string(to_string(dtype)), std::ios::binary)
          .write(reinterpret_cast<const char*>(
                     global_tensor(parameters.back().name, shape, dtype).data()),
                 static_cast<std::streamsize>(143 * bytes_of(dtype)));
      write_side(dump, parameters.back(), Role::destination);
    }
    const Problem problem = Problem::make(parameters);
    dump.problem(problem);
    dump.plan(first_holders(problem), problem);
    dump.stitch(Role::destination);
    dump.commit();
  }
  const auto script = folder.write("check.py", R"(
import sys, h5py, numpy as np
folder = sys.argv[1] + '/'
native = {'bool': 'u1', 'u8': 'u1', 'i8': 'i1', 'i16': '<i2', 'u16': '<u2', 'f16': '<f2',
          'bf16': '<u2', 'i32': '<i4', 'u32': '<u4', 'f32': '<f4', 'c64': '<c8', 'f64': '<f8',
          'i64': '<i8', 'u64': '<u8'}
with h5py.File(folder + 'd.h5') as f:
    assert f.attrs['complete'] == 1 and f['experiment/config'][()].decode() == 'größe'
    names = f['params/name'].asstr()[:]
    assert len(names) > 15
    for name in names:
        t = f['tensors'][name]
        assert t.dtype == np.dtype(native.get(name, 'u1')), (name, t.dtype)
        assert t.attrs['dtype'] == name, t.attrs['dtype']
        want = np.fromfile(folder + name, t.dtype).reshape(11, 13)
        assert t[()].tobytes() == want.tobytes(), name
    pieces = f['pieces/destination/0/f32']
    assert pieces.dtype.names == ('lo', 'hi', 'offset', 'strides')
    local = f['shards/destination/0/f32'][()]
    whole = f['tensors/f32'][()]
    for p in pieces[:]:
        (r0, c0), (r1, c1) = p['lo'], p['hi']
        part = np.lib.stride_tricks.as_strided(local.reshape(-1)[p['offset']:], (r1 - r0, c1 - c0),
                                               p['strides'] * 4)
        assert (part == whole[r0:r1, c0:c1]).all()
    rows = f['plan/bytes'].shape[0]
    volume = np.prod(f['plan/hi'][:] - f['plan/lo'][:], axis=1)
    assert rows == len(volume) and volume.sum() >= 143 * len(names)
with h5py.File(folder + 'other.h5', 'w') as f:
    f.attrs['format'] = 'm2n dump'
    f.attrs['schema_version'] = 1
    for i, half in enumerate([[0, 5], [5, 11]]):
        for name in names:
            if name not in native: continue
            whole = np.fromfile(folder + name, native[name]).reshape(11, 13)
            d = f.create_dataset(f'shards/source/{i}/{name}', data=whole[half[0]:half[1]])
            d.attrs['global_shape'] = [11, 13]
            d.attrs['box'] = [half, [0, 13]]
            if name in ('bool', 'bf16'):
                d.attrs['dtype'] = name
    f.attrs['complete'] = 1
)");
  const std::string command = "python3 '" + script.string() + "' '" + folder.path().string() + "'";
  BOOST_REQUIRE_EQUAL(std::system(command.c_str()), 0);

  const Registries registries = builtin_registries();
  const auto values = registries.values.create(
      "hdf5",
      {{{"path", (folder / "other.h5").string()}, {"side", "source"}, {"verify", "no"}}, {}});
  BOOST_TEST(values->catalogue().size() == 14U);
  for (const TensorInfo& info : values->catalogue()) {
    BOOST_TEST(info.name == to_string(info.dtype));
    std::vector<std::byte> out(143 * bytes_of(info.dtype));
    values->read(info.name, Box::whole(shape), out.data(), row_major(shape));
    BOOST_TEST((out == global_tensor(info.name, shape, info.dtype)), info.name);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
