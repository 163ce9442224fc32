// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <map>
#include <random>
#include <set>

#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using namespace testing;

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

struct NameCase {
  const char* why;
  std::string name;
  std::string path;
};
std::ostream& operator<<(std::ostream& os, const NameCase& c) { return os << c.why; }

const std::vector<NameCase> kNameCases = {
    {"dots stay inside a name", "layers.0.w", "layers.0.w"},
    {"a slash would make a group", "a/b", "a%2Fb"},
    {"an escape is escaped itself", "a%2Fb", "a%252Fb"},
    {"a dot means the group itself", ".", "%2E"},
    {"two dots", "..", "%2E."},
    {"a leading dot", ".w", "%2Ew"},
    {"a trailing dot", "w.", "w."},
    {"an empty name", "", "%"},
    {"a percent sign", "%", "%25"},
    {"a leading slash", "/w", "%2Fw"},
    {"empty components", "a//b", "a%2F%2Fb"},
    {"NUL, newline and delete", std::string("a\0\n\x7f", 4), "a%00%0A%7F"},
    {"other letters stay", "größe", "größe"},
};

BOOST_DATA_TEST_CASE(a_name_and_its_path_give_each_other, bdata::make(kNameCases), c) {
  BOOST_TEST(dump_path_of(c.name) == c.path);
  BOOST_TEST(name_of_dump_path(c.path) == c.name);
}

BOOST_AUTO_TEST_CASE(no_two_names_share_a_path) {
  std::mt19937_64 random(seed());
  const std::string alphabet = std::string("./%25EFab\0\n", 11);
  std::map<std::string, std::string, std::less<>> seen;
  for (int i = 0; i < 20000; ++i) {
    std::string name;
    for (std::size_t n = random() % 6; n > 0; --n) {
      name += alphabet[random() % alphabet.size()];
    }
    const std::string path = dump_path_of(name);
    BOOST_REQUIRE(!path.empty() && path[0] != '.' && !contains(path, "/"));
    const auto [entry, is_new] = seen.emplace(path, name);
    BOOST_REQUIRE_EQUAL(entry->second, name);
    BOOST_REQUIRE_EQUAL(name_of_dump_path(path), name);
  }
}

BOOST_AUTO_TEST_CASE(parameters_with_hostile_names_lie_apart_and_keep_their_names) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<std::string> names;
  {
    DumpWriter dump(file);
    for (const NameCase& c : kNameCases) {
      names.push_back(c.name);
      write_side(dump, replicated(c.name, {3}, DType::f32), Role::source);
    }
    dump.stitch(Role::source);
    dump.commit();
  }
  const DumpReader dump(file);
  std::set<std::string> found;
  for (const DumpShard& shard : dump.shards(Role::source)) {
    found.insert(shard.name);
    std::vector<std::byte> out(12);
    dump.read(shard, out.data());
    BOOST_TEST((out == global_tensor(shard.name, {3}, DType::f32)));
    BOOST_TEST((raw_read(file, "/source_tensors/" + dump_path_of(shard.name)).bytes == out));
    const h5::Lock lock;
    const h5::File opened = h5::open_file(file);
    const h5::Dataset dataset = h5::open_dataset(opened, shard.path);
    const std::string kept = shard.name.substr(0, shard.name.find('\0'));
    BOOST_TEST(h5::text_attribute(h5::owner_of(dataset), "name").value() == kept);
  }
  BOOST_TEST((found == std::set<std::string>(names.begin(), names.end())));
}

struct StoredAs {
  H5T_class_t type_class;
  std::size_t size;
  H5T_sign_t sign;
};
StoredAs stored_as(DType dtype) {
  switch (dtype) {
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
      return {H5T_INTEGER, bytes_of(dtype), H5T_SGN_2};
    case DType::f16:
    case DType::f32:
    case DType::f64:
      return {H5T_FLOAT, bytes_of(dtype), H5T_SGN_ERROR};
    case DType::c64:
      return {H5T_COMPOUND, 8, H5T_SGN_ERROR};
    default:  // unsigned integers, and bits that HDF5 has no type for
      return {H5T_INTEGER, bytes_of(dtype), H5T_SGN_NONE};
  }
}

BOOST_DATA_TEST_CASE(every_dtype_is_stored_bit_by_bit_as_the_schema_says, bdata::make(byte_sized()),
                     c) {
  const DType dtype = c.dtype;
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Shape shape{3, 5};
  std::vector<std::byte> data(15 * bytes_of(dtype));
  std::mt19937_64 random(seed());
  for (std::byte& byte : data) {
    byte = static_cast<std::byte>(random());  // NaNs, infinities and all
  }
  write_tensor(file, replicated("w", shape, dtype), data);

  const Raw raw = raw_read(file, "/shards/source/0/w");
  const StoredAs expected = stored_as(dtype);
  BOOST_TEST((raw.type_class == expected.type_class));
  BOOST_TEST(raw.size == expected.size);
  BOOST_TEST((raw.sign == expected.sign));
  BOOST_TEST((raw.shape == std::vector<hsize_t>{3, 5}));
  BOOST_TEST((raw.bytes == data));

  const DumpReader dump(file);
  const auto shards = dump.shards(Role::source);
  BOOST_REQUIRE_EQUAL(shards.size(), 1U);
  BOOST_TEST((shards[0].dtype == dtype));
  BOOST_TEST((shards[0].shape == shape));
  std::vector<std::byte> read(data.size());
  dump.read(shards[0], read.data());
  BOOST_TEST((read == data));
}

BOOST_AUTO_TEST_CASE(dtypes_that_pack_elements_are_refused) {
  const TemporaryFolder folder;
  DumpWriter dump(folder / "d.h5");
  for (const DType dtype : {DType::f4, DType::f6_e2m3, DType::f6_e3m2}) {
    Parameter parameter;
    expect_error(Errc::bad_argument, {std::string(to_string(dtype))}, [&] {
      parameter = replicated("w", {2, 4}, dtype);
      dump.shard(Role::source, 0, parameter, parameter.source.layout->compact(0), nullptr);
    });
  }
}

BOOST_AUTO_TEST_CASE(bf16_and_fp8_keep_bits_that_a_library_conversion_would_change) {  // D03, D04
  const TemporaryFolder folder;
  const std::vector<std::uint16_t> bf16 = {0x3f80, 0x4049, 0x7f80, 0x7fc0, 0x0001, 0x8000};
  const std::vector<std::uint8_t> fp8 = {0x38, 0x7e, 0x78, 0x7f, 0x01, 0xff};
  const std::vector<std::uint16_t> f16 = {0x3c00, 0x7c01, 0xfe00, 0x0001, 0x8000, 0xfc00};
  write_tensor(folder / "bf16.h5", replicated("w", {6}, DType::bf16), bytes_of_values(bf16));
  write_tensor(folder / "fp8.h5", replicated("w", {6}, DType::f8_e4m3), bytes_of_values(fp8));
  write_tensor(folder / "f16.h5", replicated("w", {6}, DType::f16), bytes_of_values(f16));
  BOOST_TEST(raw_column<std::uint16_t>(folder / "bf16.h5", "/shards/source/0/w") == bf16,
             boost::test_tools::per_element());
  BOOST_TEST(raw_column<std::uint8_t>(folder / "fp8.h5", "/shards/source/0/w") == fp8,
             boost::test_tools::per_element());
  BOOST_TEST(raw_column<std::uint16_t>(folder / "f16.h5", "/shards/source/0/w") == f16,
             boost::test_tools::per_element());
  // HDF5's own f16 has IEEE's value: 1.0 is 1.0 after a conversion to float by HDF5.
  const h5::Lock lock;
  const hid_t file = H5Fopen((folder / "f16.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, "/shards/source/0/w", H5P_DEFAULT);
  std::array<float, 6> values{};
  H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
  H5Dclose(dataset);
  H5Fclose(file);
  BOOST_TEST(values[0] == 1.0F);
  BOOST_TEST(values[3] == 0x1p-24F);
}

BOOST_AUTO_TEST_CASE(scalars_and_empty_tensors_are_kept_and_stitched) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<Parameter> parameters = {
      replicated("scalar", {}, DType::f32), replicated("none", {0}, DType::bf16),
      replicated("rows", {0, 4}, DType::i64), replicated("inner", {4, 0, 3}, DType::u8),
      replicated("one", {1}, DType::f64)};
  Parameter sharded;
  sharded.name = "sharded";
  sharded.shape = {0, 4};
  sharded.source =
      side_of("sharded", Layout::sharded({0, 4}, DType::f32, Mesh({2}, 0), {Placement::shard(1)}));
  sharded.destination = sharded.source;
  parameters.push_back(sharded);
  {
    DumpWriter dump(file);
    for (const Parameter& parameter : parameters) {
      write_side(dump, parameter, Role::destination);
    }
    dump.stitch(Role::destination);
    dump.commit();
  }
  for (const Parameter& parameter : parameters) {
    const Raw raw = raw_read(file, "/tensors/" + parameter.name);
    BOOST_TEST((raw.shape == std::vector<hsize_t>(parameter.shape.begin(), parameter.shape.end())));
    BOOST_TEST((raw.bytes == global_tensor(parameter.name, parameter.shape,
                                           parameter.destination.layout->dtype())));
  }
  const DumpReader dump(file);
  dump.verify();
  for (const DumpShard& shard : dump.shards(Role::destination)) {
    std::vector<std::byte> out(static_cast<std::size_t>(element_count(shard.compact.local_shape)) *
                               bytes_of(shard.dtype));
    dump.read(shard, out.data());
    if (shard.name == "scalar") {
      BOOST_TEST((shard.compact.pieces.at(0).box == Box{}));
      BOOST_TEST((out == global_tensor("scalar", {}, DType::f32)));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
