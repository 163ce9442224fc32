// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Dumps as programs read and write them that know nothing of m2n: h5py and h5dump.

#include <cstdlib>
#include <fstream>

#include "core/api/builtin.hpp"
#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

namespace utf = boost::unit_test;
using namespace testing;

/// Runs @p program through the shell. @return what system() says; 0 is success.
int run(const std::string& program, const std::vector<std::string>& words) {
  std::string line = "'" + program + "'";
  for (const std::string& word : words) {
    line += " '" + word + "'";
  }
  return std::system(line.c_str());
}

/// A Python that has h5py and NumPy; empty when there is none.
std::string python() {
  static const std::string kPython = [] {
    const char* given = std::getenv("M2N_PYTHON");
    for (const char* candidate : {given, "/usr/bin/python3", "python3"}) {
      if (candidate != nullptr &&
          std::system(
              ("'" + std::string(candidate) + "' -c 'import h5py, numpy' 2>/dev/null").c_str()) ==
              0) {
        return std::string(candidate);
      }
    }
    return std::string();
  }();
  return kPython;
}

boost::test_tools::assertion_result has_h5py(utf::test_unit_id) {
  boost::test_tools::assertion_result result(!python().empty());
  result.message() << "no python3 here has h5py";
  return result;
}

boost::test_tools::assertion_result has_h5dump(utf::test_unit_id) {
  boost::test_tools::assertion_result result(std::system("h5dump --version >/dev/null 2>&1") == 0);
  result.message() << "there is no h5dump here";
  return result;
}

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

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
    everything = []
    f.visititems(lambda path, node: everything.append(node[()]) if isinstance(node, h5py.Dataset) else None)
    assert len(everything) > 100
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
  BOOST_REQUIRE_EQUAL(run(python(), {script.string(), folder.path().string()}), 0);

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

BOOST_AUTO_TEST_CASE(h5py_reads_tensors_across_the_files_of_ranks, *utf::precondition(has_h5py)) {
  const TemporaryFolder folder;
  const Parameter parameter = with_layout(
      "w", mesh_layout({13, 6}, {2, 2}, {Placement::strided_shard(0, 3), Placement::shard(1)}));
  const auto global = global_tensor("w", parameter.shape, DType::f32);
  const DumpOptions options{.deflate_level = 0, .run_id = "r1"};
  DumpWriter dump(folder / "d.h5", options);
  for (const Rank rank : parameter.destination.layout->ranks()) {
    const CompactShard shard = parameter.destination.layout->compact(rank);
    const std::string name = dump_part_name(folder / "d.h5", "r1", rank);
    DumpWriter part(folder / name, options);
    part.shard(Role::destination, rank, parameter, shard,
               compact_tensor(shard, parameter.shape, DType::f32, global).data());
    part.commit();
    dump.shard_in_part(name, Role::destination, rank, parameter, shard);
  }
  dump.stitch(Role::destination);
  dump.commit();
  folder.write("w", std::string(reinterpret_cast<const char*>(global.data()), global.size()));
  const auto script = folder.write("check.py", R"(
import os, sys, h5py, numpy as np
os.chdir('/')
with h5py.File(sys.argv[1] + '/d.h5') as f:
    want = np.fromfile(sys.argv[1] + '/w', '<f4').reshape(13, 6)
    assert f['tensors/w'].is_virtual and (f['tensors/w'][()] == want).all()
    assert (f['tensors/w'][7:12, 2:5] == want[7:12, 2:5]).all()
    assert [f['shards/destination'].get(str(r), getlink=True).filename for r in range(4)] == list(f['parts/file'].asstr()[:])
    assert f['shards/destination/3/w'].size > 0 and len(f['pieces/destination/0/w']) > 1
)");
  BOOST_TEST(run(python(), {script.string(), folder.path().string()}) == 0);
}

BOOST_AUTO_TEST_CASE(h5dump_prints_parameters_plan_and_stitched_tensors,
                     *utf::precondition(has_h5dump)) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Problem problem =
      Problem::make({moved("a", {6, 4}, DType::bf16, 2, 3), moved("b/c", {5}, DType::f64, 2, 2),
                     moved("q", {8}, DType::f8_e4m3, 2, 2), moved("n", {9}, DType::i32, 3, 2)});
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.plan(first_holders(problem), problem);
    for (const Parameter& parameter : problem.parameters()) {
      write_side(dump, parameter, Role::destination);
    }
    dump.stitch(Role::destination);
    dump.commit();
  }
  const auto h5dump = [&](const std::string& words) {
    const std::string out = (folder / "out").string();
    const std::string line = "h5dump " + words + " '" + file.string() + "' >'" + out + "' 2>&1";
    const int status = std::system(line.c_str());
    std::string text = read_file(out);
    BOOST_TEST(status == 0, line << ": " << text);
    return text;
  };
  BOOST_TEST(contains(h5dump("-A"), "ATTRIBUTE \"complete\""));
  const std::string names = h5dump("-d /params/name");
  for (const char* name : {"\"a\\000", "\"b/c\"", "\"q\\000", "\"n\\000"}) {
    BOOST_TEST(contains(names, name), names);
  }
  const std::string bytes = h5dump("-y -d /plan/bytes");
  for (const std::uint64_t value : raw_column<std::uint64_t>(file, "/plan/bytes")) {
    BOOST_TEST(contains(bytes, std::to_string(value)), bytes);
  }
  for (const Parameter& parameter : problem.parameters()) {
    // As little-endian bytes, from the virtual dataset.
    h5dump("-b LE -o '" + (folder / "raw").string() + "' -d '/tensors/" +
           dump_path_of(parameter.name) + "'");
    const std::string raw = read_file(folder / "raw");
    const auto expected =
        global_tensor(parameter.name, parameter.shape, parameter.destination_dtype());
    BOOST_TEST(
        (raw == std::string(reinterpret_cast<const char*>(expected.data()), expected.size())),
        parameter.name);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
