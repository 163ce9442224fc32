// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump.hpp"

#include <fcntl.h>
#define H5_USE_110_API
#include <hdf5.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "core/io/dump_h5.hpp"
#include "core/plan/plan_builder.hpp"
#include "core/tensor/copy.hpp"
#include "core/tensor/digest.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace utf = boost::unit_test;
using testing::TemporaryFolder;

/// Everything that the process writes to stderr while tests run, so that the last test can look for
/// HDF5's own diagnostics in it.
class StderrWatch {
 public:
  StderrWatch() {
    std::cerr.flush();
    real_ = ::dup(STDERR_FILENO);
    std::string name = (std::filesystem::temp_directory_path() / "m2n-stderr-XXXXXX").string();
    file_ = ::mkstemp(name.data());
    ::unlink(name.c_str());
    ::dup2(file_, STDERR_FILENO);
  }
  ~StderrWatch() {
    const std::string text = so_far();
    ::dup2(real_, STDERR_FILENO);
    std::cerr << text;
  }
  std::string so_far() const {
    std::cerr.flush();
    std::string text(static_cast<std::size_t>(::lseek(file_, 0, SEEK_END)), '\0');
    const ssize_t got = ::pread(file_, text.data(), text.size(), 0);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return text;
  }

 private:
  int real_ = -1;
  int file_ = -1;
};
struct Watched {
  static inline std::unique_ptr<StderrWatch> watch;
  Watched() { watch = std::make_unique<StderrWatch>(); }
  ~Watched() { watch.reset(); }
};
BOOST_TEST_GLOBAL_FIXTURE(Watched);

/// A seed for everything random here; M2N_TEST_SEED repeats a run.
std::uint64_t seed() {
  static const std::uint64_t kSeed = [] {
    const char* given = std::getenv("M2N_TEST_SEED");
    const std::uint64_t value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "M2N_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return kSeed;
}

struct DTypeCase {
  DType dtype;
};
std::ostream& operator<<(std::ostream& os, const DTypeCase& c) { return os << to_string(c.dtype); }

std::vector<DTypeCase> byte_sized() {
  std::vector<DTypeCase> out;
  for (const DType dtype : all_dtypes()) {
    if (is_byte_sized(dtype)) {
      out.push_back({dtype});
    }
  }
  return out;
}

/// Every element different, as far as the type has room: values of a synthetic tensor.
std::vector<std::byte> global_tensor(const std::string& name, const Shape& shape, DType dtype) {
  std::vector<std::byte> out(static_cast<std::size_t>(element_count(shape)) * bytes_of(dtype));
  fill_synthetic(shape, Box::whole(shape), dtype, synthetic_seed(name), out.data(),
                 row_major(shape));
  return out;
}

/// Copies between a global tensor and a box of it elsewhere, element by element.
void copy_box(const Shape& shape, const Box& box, std::uint64_t item, std::byte* global,
              std::byte* part, Index first, const Strides& strides, bool to_part) {
  const Strides global_strides = row_major(shape);
  const Index count = box.volume();
  const Shape extents = box.extents();
  for (Index i = 0; i < count; ++i) {
    Index rest = i;
    Index at = 0;
    Index local = first;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const Index c = rest % extents[d];
      rest /= extents[d];
      at += (box.lo[d] + c) * global_strides[d];
      local += c * strides[d];
    }
    std::byte* a = global + static_cast<std::uint64_t>(at) * item;
    std::byte* b = part + static_cast<std::uint64_t>(local) * item;
    std::memcpy(to_part ? b : a, to_part ? a : b, item);
  }
}

std::vector<std::byte> compact_tensor(const CompactShard& shard, const Shape& shape, DType dtype,
                                      std::vector<std::byte> global) {
  const std::uint64_t item = bytes_of(dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(element_count(shard.local_shape)) * item);
  for (const Piece& piece : shard.pieces) {
    copy_box(shape, piece.box, item, global.data(), out.data(),
             static_cast<Index>(piece.view.offset_bytes / item), piece.view.strides, true);
  }
  return out;
}

Side side_of(const std::string& name, Layout layout) {
  const std::uint32_t slots = layout.slot_count();
  Side side{std::make_shared<const Layout>(std::move(layout)), {}};
  for (std::uint32_t i = 0; i < slots; ++i) {
    side.buffers.push_back(name + "#" + std::to_string(i));
  }
  return side;
}

Parameter replicated(const std::string& name, const Shape& shape, DType dtype) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.source =
      side_of(name, Layout::sharded(shape, dtype, Mesh({1}, 0), {Placement::replicate()}));
  parameter.destination =
      side_of(name, Layout::sharded(shape, dtype, Mesh({1}, 1), {Placement::replicate()}));
  return parameter;
}

const Side& side(const Parameter& parameter, Role role) {
  return role == Role::source ? parameter.source : parameter.destination;
}

/// Writes all shards of a side, with synthetic values of the parameter's name.
void write_side(DumpWriter& dump, const Parameter& parameter, Role role) {
  const Layout& layout = *side(parameter, role).layout;
  const auto global = global_tensor(parameter.name, parameter.shape, layout.dtype());
  for (const Rank rank : layout.ranks()) {
    const CompactShard shard = layout.compact(rank);
    const auto data = compact_tensor(shard, parameter.shape, layout.dtype(), global);
    dump.shard(role, rank, parameter, shard, data.data());
  }
}

void write_tensor(const std::filesystem::path& file, const Parameter& parameter,
                  const std::vector<std::byte>& data, const DumpOptions& options = {}) {
  DumpWriter dump(file, options);
  dump.shard(Role::source, 0, parameter, parameter.source.layout->compact(0), data.data());
  dump.commit();
}

/// What HDF5 says itself about a dataset, without m2n.
struct Raw {
  H5T_class_t type_class = H5T_NO_CLASS;
  std::size_t size = 0;
  H5T_sign_t sign = H5T_SGN_ERROR;
  std::vector<hsize_t> shape;
  std::vector<hsize_t> chunk;
  H5D_layout_t layout = H5D_LAYOUT_ERROR;
  haddr_t offset = HADDR_UNDEF;
  std::vector<std::byte> bytes;
};

Raw raw_read(const std::filesystem::path& path, const std::string& name) {
  const h5::Lock lock;
  Raw out;
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  BOOST_REQUIRE_GE(dataset, 0);
  const hid_t type = H5Dget_type(dataset);
  const hid_t space = H5Dget_space(dataset);
  const hid_t properties = H5Dget_create_plist(dataset);
  out.type_class = H5Tget_class(type);
  out.size = H5Tget_size(type);
  if (out.type_class == H5T_INTEGER) {
    out.sign = H5Tget_sign(type);
  }
  out.shape.resize(static_cast<std::size_t>(H5Sget_simple_extent_ndims(space)));
  H5Sget_simple_extent_dims(space, out.shape.data(), nullptr);
  out.layout = H5Pget_layout(properties);
  if (out.layout == H5D_CHUNKED) {
    out.chunk.resize(out.shape.size());
    H5Pget_chunk(properties, static_cast<int>(out.chunk.size()), out.chunk.data());
  }
  out.offset = H5Dget_offset(dataset);
  out.bytes.resize(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)) * out.size);
  if (!out.bytes.empty()) {
    BOOST_REQUIRE_GE(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.bytes.data()), 0);
  }
  H5Pclose(properties);
  H5Sclose(space);
  H5Tclose(type);
  H5Dclose(dataset);
  H5Fclose(file);
  return out;
}

template <class Value>
std::vector<Value> raw_column(const std::filesystem::path& path, const std::string& name) {
  const Raw raw = raw_read(path, name);
  BOOST_REQUIRE_EQUAL(raw.bytes.size() % sizeof(Value), 0U);
  std::vector<Value> out(raw.bytes.size() / sizeof(Value));
  std::memcpy(out.data(), raw.bytes.data(), raw.bytes.size());
  return out;
}

std::vector<std::string> raw_texts(const std::filesystem::path& path, const std::string& name) {
  const Raw raw = raw_read(path, name);
  BOOST_REQUIRE(raw.type_class == H5T_STRING);
  std::vector<std::string> out;
  for (std::size_t i = 0; i < raw.bytes.size(); i += raw.size) {
    std::string one(reinterpret_cast<const char*>(raw.bytes.data()) + i, raw.size);
    one.erase(one.find_last_not_of('\0') + 1);
    out.push_back(one);
  }
  return out;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Runs @p action, which must throw an Error of @p code whose text has every one of @p parts.
void expect_error(Errc code, const std::vector<std::string>& parts,
                  const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    BOOST_TEST((error.code() == code), to_string(error.code()) << ": " << error.what());
    for (const std::string& part : parts) {
      BOOST_TEST(contains(error.what(), part), "'" << error.what() << "' lacks '" << part << "'");
    }
    return;
  }
  BOOST_ERROR("nothing was thrown");
}

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    out.push_back(entry.path().filename().string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

template <class Value>
std::vector<std::byte> bytes_of_values(const std::vector<Value>& values) {
  std::vector<std::byte> out(values.size() * sizeof(Value));
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

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

BOOST_AUTO_TEST_CASE(bf16_and_fp8_keep_bits_that_a_library_conversion_would_change) {
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

struct LayoutCase {
  const char* why;
  std::function<Layout()> make;
  bool whole = true;  ///< The ranks together hold every element.
};
std::ostream& operator<<(std::ostream& os, const LayoutCase& c) { return os << c.why; }

Layout mesh_layout(const Shape& shape, const Dims& dims, const std::vector<Placement>& placements) {
  return Layout::sharded(shape, DType::f32, Mesh(dims, 0), placements);
}

const std::vector<LayoutCase> kLayoutCases = {
    {.why = "rows",
     .make =
         [] {
           return mesh_layout({8, 3}, {4}, {Placement::shard(0)});
         }},
    {.why = "uneven rows, and a rank without any",
     .make =
         [] {
           return mesh_layout({9, 3}, {4}, {Placement::shard(0)});
         }},
    {.why = "columns",
     .make =
         [] {
           return mesh_layout({4, 10}, {3}, {Placement::shard(1)});
         }},
    {.why = "both dimensions",
     .make =
         [] {
           return mesh_layout({5, 7}, {2, 3}, {Placement::shard(0), Placement::shard(1)});
         }},
    {.why = "FSDP2 over tensor parallel: strided rows",
     .make =
         [] {
           return mesh_layout({8, 8}, {2, 2},
                              {Placement::strided_shard(0, 2), Placement::shard(0)});
         }},
    {.why = "strided, uneven",
     .make =
         [] {
           return mesh_layout({13, 3}, {3}, {Placement::strided_shard(0, 3)});
         }},
    {.why = "strided along both dimensions, uneven",
     .make =
         [] {
           return mesh_layout({11, 13}, {2, 3},
                              {Placement::strided_shard(0, 3), Placement::strided_shard(1, 2)});
         }},
    {.why = "the disputed uneven strided shard",
     .make = [] { return mesh_layout({5}, {2}, {Placement::strided_shard(0, 2)}); }},
    {.why = "replicas",
     .make =
         [] {
           return mesh_layout({6, 2}, {2, 3}, {Placement::replicate(), Placement::shard(0)});
         }},
    {.why = "replicated whole",
     .make =
         [] {
           return mesh_layout({6, 2}, {3}, {Placement::replicate()});
         }},
    {.why = "three dimensions",
     .make =
         [] {
           return mesh_layout({4, 6, 5}, {2, 2}, {Placement::shard(2), Placement::shard(1)});
         }},
    {.why = "a flat buffer whose ranks start in the middle of a row",
     .make =
         [] {
           return Layout::flat({5, 7}, DType::f32, 4, 41, {0, 1, 2});
         }},
    {.why = "a flat buffer of three dimensions",
     .make =
         [] {
           return Layout::flat({5, 4, 5}, DType::f32, 8, 120, {0, 1});
         }},
    {.why = "pieces that form no grid, in no order",
     .make =
         [] {
           return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                          {{0, {{Dims{2, 0}, Dims{4, 3}}, {0, 0, {4, 1}}}},
                                           {0, {{Dims{0, 0}, Dims{1, 4}}, {0, 64, {4, 1}}}},
                                           {1, {{Dims{1, 0}, Dims{2, 4}}, {0, 0, {4, 1}}}},
                                           {1, {{Dims{2, 3}, Dims{4, 4}}, {0, 64, {1, 1}}}}});
         }},
    {.why = "pieces that overlap",
     .make =
         [] {
           return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                          {{0, {{Dims{0, 0}, Dims{3, 4}}, {0, 0, {4, 1}}}},
                                           {1, {{Dims{1, 0}, Dims{4, 4}}, {0, 0, {4, 1}}}}});
         }},
    {.why = "a hole",
     .make =
         [] {
           return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                          {{0, {{Dims{0, 0}, Dims{2, 4}}, {0, 0, {4, 1}}}},
                                           {1, {{Dims{2, 0}, Dims{4, 3}}, {0, 0, {3, 1}}}}});
         },
     .whole = false},
};

Parameter with_layout(const std::string& name, const Layout& layout) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = layout.shape();
  parameter.source = side_of(name, layout);
  parameter.destination = parameter.source;
  return parameter;
}

BOOST_DATA_TEST_CASE(shards_stitch_into_the_global_tensor, bdata::make(kLayoutCases), c) {
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

BOOST_DATA_TEST_CASE(any_part_of_any_piece_is_read_back, bdata::make(kLayoutCases), c) {
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

BOOST_DATA_TEST_CASE(values_come_back_from_a_dump, bdata::make(kLayoutCases), c) {
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

/// A plan that sends every destination piece from the first sources that hold it.
Plan first_holders(const Problem& problem) {
  PlanBuilder builder(problem, "first holders");
  for (const GeometryGroup& group : group_by_geometry(problem)) {
    Pattern pattern;
    pattern.geometry = group.geometry;
    const auto sources = group.geometry.source->pieces();
    const auto destinations = group.geometry.destination->pieces();
    for (std::uint32_t to = 0; to < destinations.size(); ++to) {
      std::vector<Box> missing{destinations[to].piece.box};
      for (std::uint32_t from = 0; from < sources.size() && !missing.empty(); ++from) {
        std::vector<Box> rest;
        for (const Box& wanted : missing) {
          const auto part = intersect(wanted, sources[from].piece.box);
          if (part && !part->empty()) {
            pattern.moves.push_back({static_cast<std::uint32_t>(pattern.boxes.size()), from,
                                     group.geometry.source_count() + to, 0});
            pattern.boxes.push_back(*part);
            subtract(wanted, *part, rest);
          } else {
            rest.push_back(wanted);
          }
        }
        missing = std::move(rest);
      }
    }
    const std::uint32_t number = builder.add(std::move(pattern));
    for (const std::uint32_t parameter : group.parameters) {
      builder.assign(parameter, number, parameter % 2);
    }
  }
  return std::move(builder).finish();
}

Parameter moved(const std::string& name, const Shape& shape, DType dtype, Rank sources,
                Rank destinations) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.source =
      side_of(name, Layout::sharded(shape, dtype, Mesh({sources}, 0), {Placement::shard(0)}));
  parameter.destination =
      side_of(name, Layout::sharded(shape, dtype, Mesh({destinations}, sources),
                                    {Placement::shard(static_cast<int>(shape.size()) - 1)}));
  return parameter;
}

BOOST_AUTO_TEST_CASE(a_plan_has_one_row_a_region_and_traffic_adds_it_up) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  // More rows than one chunk of the widest and of the narrowest column holds.
  std::vector<Parameter> parameters;
  for (int i = 0; i < 250; ++i) {
    parameters.push_back(moved("w" + std::to_string(i), {2000}, DType::bf16, 1000, 667));
    parameters.push_back(moved("m" + std::to_string(i), {3, 4}, DType::f32, 2, 3));
  }
  const Problem problem = Problem::make(std::move(parameters));
  const Plan plan = first_holders(problem);
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.plan(plan, problem);
    dump.commit();
  }
  const auto parameter = raw_column<std::uint32_t>(file, "/plan/parameter");
  const auto stage = raw_column<std::uint32_t>(file, "/plan/stage");
  const auto source = raw_column<std::int32_t>(file, "/plan/source");
  const auto destination = raw_column<std::int32_t>(file, "/plan/destination");
  const auto source_role = raw_column<std::uint8_t>(file, "/plan/source_role");
  const auto destination_role = raw_column<std::uint8_t>(file, "/plan/destination_role");
  const auto source_holding = raw_column<std::uint32_t>(file, "/plan/source_holding");
  const auto destination_holding = raw_column<std::uint32_t>(file, "/plan/destination_holding");
  const auto lo = raw_column<std::array<std::int64_t, 2>>(file, "/plan/lo");
  const auto hi = raw_column<std::array<std::int64_t, 2>>(file, "/plan/hi");
  const auto bytes = raw_column<std::uint64_t>(file, "/plan/bytes");
  BOOST_TEST(parameter.size() * 4 > std::size_t{1} << 20);

  std::size_t row = 0;
  std::map<std::pair<Rank, Rank>, std::pair<std::uint64_t, std::uint64_t>> traffic;
  for (std::uint32_t i = 0; i < problem.parameters().size(); ++i) {
    const Pattern& pattern = plan.patterns[plan.pattern_of[i]];
    for (const Move& move : pattern.moves) {
      BOOST_REQUIRE_LT(row, parameter.size());
      const Box& box = pattern.boxes[move.box];
      const bool flat = box.rank() == 1;
      BOOST_REQUIRE(std::tuple(parameter[row], stage[row], source[row], destination[row],
                               source_role[row], destination_role[row], source_holding[row],
                               destination_holding[row], lo[row][0], hi[row][0], lo[row][1],
                               hi[row][1], bytes[row]) ==
                    std::tuple(i, i % 2, pattern.rank_of(move.from), pattern.rank_of(move.to), 0, 1,
                               move.from, move.to, box.lo[0], box.hi[0], flat ? 0 : box.lo[1],
                               flat ? 1 : box.hi[1],
                               static_cast<std::uint64_t>(box.volume()) * (flat ? 2U : 4U)));
      auto& [pair_bytes, pair_regions] = traffic[{source[row], destination[row]}];
      pair_bytes += bytes[row];
      ++pair_regions;
      ++row;
    }
  }
  BOOST_TEST(row == parameter.size());
  BOOST_TEST(row == summarize(plan, problem).regions);

  const auto from = raw_column<std::int32_t>(file, "/traffic/source");
  const auto to = raw_column<std::int32_t>(file, "/traffic/destination");
  const auto pair_bytes = raw_column<std::uint64_t>(file, "/traffic/bytes");
  const auto pair_regions = raw_column<std::uint64_t>(file, "/traffic/regions");
  BOOST_REQUIRE_EQUAL(from.size(), traffic.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    BOOST_REQUIRE((traffic.at({from[i], to[i]}) == std::pair(pair_bytes[i], pair_regions[i])));
  }
  DumpReader(file).verify();
  BOOST_TEST(DumpReader(file).fact("plan_digest").value() == plan.digest);
  for (const char* column : {"parameter", "lo", "bytes"}) {
    const Raw raw = raw_read(file, std::string("/plan/") + column);
    std::uint64_t chunk = raw.size;
    for (const hsize_t extent : raw.chunk) {
      chunk *= extent;
    }
    BOOST_TEST((raw.layout == H5D_CHUNKED));
    BOOST_TEST(chunk <= h5::kLargestChunkBytes);
  }
}

BOOST_AUTO_TEST_CASE(parameters_and_layouts_say_what_the_problem_says) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::vector<Parameter> parameters = {
      moved("a", {6, 4}, DType::bf16, 2, 2), moved("b/c", {6, 4}, DType::bf16, 2, 2),
      moved("n", {10}, DType::f32, 3, 1), replicated("s", {}, DType::i64)};
  parameters[2].destination =
      side_of("n", Layout::sharded({10}, DType::bf16, Mesh({1}, 3), {Placement::replicate()}));
  parameters[2].cast = true;
  const Problem problem = Problem::make(parameters);
  {
    DumpWriter dump(file);
    dump.problem(problem);
    dump.commit();
  }
  using Strings = std::vector<std::string>;
  BOOST_TEST((raw_texts(file, "/params/name") == Strings{"a", "b/c", "n", "s"}));
  BOOST_TEST((raw_texts(file, "/params/path") == Strings{"a", "b%2Fc", "n", "s"}));
  BOOST_TEST((raw_texts(file, "/params/dtype") == Strings{"bf16", "bf16", "f32", "i64"}));
  BOOST_TEST(
      (raw_texts(file, "/params/destination_dtype") == Strings{"bf16", "bf16", "bf16", "i64"}));
  BOOST_TEST((raw_texts(file, "/params/source_buffers") ==
              Strings{R"(["a#0"])", R"(["b/c#0"])", R"(["n#0"])", R"(["s#0"])"}));
  BOOST_TEST(
      (raw_column<std::uint32_t>(file, "/params/rank") == std::vector<std::uint32_t>{2, 2, 1, 0}));
  BOOST_TEST(
      (raw_column<std::uint8_t>(file, "/params/cast") == std::vector<std::uint8_t>{0, 0, 1, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/params/bytes") ==
              std::vector<std::uint64_t>{48, 48, 20, 8}));
  const auto shapes = raw_column<std::array<std::int64_t, 8>>(file, "/params/shape");
  BOOST_TEST((shapes[0] == std::array<std::int64_t, 8>{6, 4, 1, 1, 1, 1, 1, 1}));
  BOOST_TEST((shapes[3] == std::array<std::int64_t, 8>{1, 1, 1, 1, 1, 1, 1, 1}));

  const std::string json = raw_texts(file, "/layouts/json").at(0);
  const auto begin = raw_column<std::uint64_t>(file, "/layouts/begin");
  const auto end = raw_column<std::uint64_t>(file, "/layouts/end");
  const auto source = raw_column<std::uint32_t>(file, "/params/source_layout");
  const auto destination = raw_column<std::uint32_t>(file, "/params/destination_layout");
  BOOST_TEST(boost::json::parse(json).as_array().size() == begin.size());
  BOOST_TEST(begin.size() == 6U);  // a and b/c share theirs, which are other objects
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    BOOST_TEST(json.substr(begin[source[i]], end[source[i]] - begin[source[i]]) ==
               parameters[i].source.layout->canonical_json());
    BOOST_TEST(json.substr(begin[destination[i]], end[destination[i]] - begin[destination[i]]) ==
               parameters[i].destination.layout->canonical_json());
  }
  BOOST_TEST((DumpReader(file).parameters() == Strings{"a", "b/c", "n", "s"}));
}

BOOST_AUTO_TEST_CASE(rounds_keep_every_rank_and_peer) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  {
    DumpWriter dump(file);
    dump.round(0, {7, 0.25, 16, {{1, 100, 0, "memory"}, {2, 50, 5, "wire"}}});
    dump.round(1, {7, 0.5, 0, {{0, 0, 100, "memory"}}});
    dump.round(0, {8, 0.125, 16, {}});
    dump.commit();
  }
  BOOST_TEST(
      (raw_column<std::uint64_t>(file, "/rounds/version") == std::vector<std::uint64_t>{7, 7, 8}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/rounds/rank") == std::vector<std::int32_t>{0, 1, 0}));
  BOOST_TEST(
      (raw_column<double>(file, "/rounds/seconds") == std::vector<double>{0.25, 0.5, 0.125}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/copied_bytes") ==
              std::vector<std::uint64_t>{16, 0, 16}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/rounds/peers/peer") == std::vector<std::int32_t>{1, 2, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/peers/sent_bytes") ==
              std::vector<std::uint64_t>{100, 50, 0}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/rounds/peers/received_bytes") ==
              std::vector<std::uint64_t>{0, 5, 100}));
  const auto path = raw_column<std::uint32_t>(file, "/rounds/peers/path");
  const auto paths = raw_texts(file, "/rounds/peers/paths");
  BOOST_TEST(paths.at(path.at(0)) == "memory");
  BOOST_TEST(paths.at(path.at(1)) == "wire");
  BOOST_TEST(paths.at(path.at(2)) == "memory");
}

BOOST_AUTO_TEST_CASE(a_timeline_keeps_every_message_and_port) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  {
    DumpWriter dump(file);
    dump.timeline({2.5,
                   {{0.0, 1.5, 0, 2, 0, 100}, {1.5, 2.5, 2, 1, 1, 50}},
                   {{"rank 0 out", 100, 1.5}, {"nic 1", 50, 0.75}, {"x", 1, 0.0}}});
    dump.commit();
  }
  BOOST_TEST((raw_column<double>(file, "/simulation/start") == std::vector<double>{0.0, 1.5}));
  BOOST_TEST((raw_column<double>(file, "/simulation/end") == std::vector<double>{1.5, 2.5}));
  BOOST_TEST(
      (raw_column<std::int32_t>(file, "/simulation/source") == std::vector<std::int32_t>{0, 2}));
  BOOST_TEST((raw_column<std::int32_t>(file, "/simulation/destination") ==
              std::vector<std::int32_t>{2, 1}));
  BOOST_TEST(
      (raw_column<std::uint32_t>(file, "/simulation/stage") == std::vector<std::uint32_t>{0, 1}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/simulation/bytes") ==
              std::vector<std::uint64_t>{100, 50}));
  BOOST_TEST((raw_texts(file, "/simulation/ports/name") ==
              std::vector<std::string>{"rank 0 out", "nic 1", "x"}));
  BOOST_TEST((raw_column<std::uint64_t>(file, "/simulation/ports/bytes") ==
              std::vector<std::uint64_t>{100, 50, 1}));
  BOOST_TEST(
      (raw_column<double>(file, "/simulation/ports/busy") == std::vector<double>{1.5, 0.75, 0.0}));
  DumpReader(file).verify();
}

BOOST_AUTO_TEST_CASE(texts_of_any_length_are_kept_whole) {
  // 65,440 bytes fit into an attribute of the default format, 65,472 do not.
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  std::map<std::string, std::string> facts;
  for (const std::size_t length : {0U, 1U, 65440U, 65472U, 160000U, 3000000U}) {
    std::string text(length, 'x');
    for (std::size_t i = 0; i < length; ++i) {
      text[i] = static_cast<char>('a' + i % 23);
    }
    facts["n" + std::to_string(length)] = text;
  }
  facts["empty/key"] = "";
  facts["umlauts"] = "größe\n";
  {
    DumpWriter dump(file);
    dump.experiment(facts);
    expect_error(Errc::bad_argument, {"umlauts", "once"}, [&] {
      dump.experiment({{"umlauts", "again"}});
    });
    dump.commit();
  }
  const DumpReader dump(file);
  for (const auto& [key, text] : facts) {
    BOOST_TEST((dump.fact(key) == text), key);
  }
  BOOST_TEST(!dump.fact("missing").has_value());
  const auto all = dump.facts();
  BOOST_TEST(all.size() == facts.size() + 1);  // and hdf5_version
  BOOST_TEST(all.contains("hdf5_version"));
  dump.verify();
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

BOOST_AUTO_TEST_CASE(chunks_stay_small_whatever_the_tensor_and_shards_are_contiguous) {
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

BOOST_AUTO_TEST_CASE(blocks_are_contiguous_in_order_and_below_the_limit) {
  std::mt19937_64 random(seed());
  for (int round = 0; round < 500; ++round) {
    Shape shape;
    for (std::size_t d = random() % 5; d > 0; --d) {
      shape.push_back(static_cast<Index>(random() % 7));
    }
    const std::uint64_t item = 1 + random() % 8;
    const std::uint64_t limit = 1 + random() % 200;
    const Strides strides = row_major(shape);
    Index next = 0;
    h5::for_each_block(shape, item, limit, [&](const Box& box) {
      BOOST_REQUIRE(Box::whole(shape).contains(box));
      BOOST_REQUIRE(box.volume() == 1 || static_cast<std::uint64_t>(box.volume()) * item <= limit);
      Index first = 0;
      Index last = 0;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        first += box.lo[d] * strides[d];
        last += (box.hi[d] - 1) * strides[d];
      }
      BOOST_REQUIRE_EQUAL(first, next);
      next += box.volume();
      BOOST_REQUIRE_EQUAL(last + 1, next);
    });
    BOOST_REQUIRE_EQUAL(next, element_count(shape));
  }
}

std::uint64_t bytes_read_by_this_process() {
  std::ifstream io("/proc/self/io");
  std::string key;
  std::uint64_t value = 0;
  io >> key >> value;
  return key == "rchar:" ? value : 0;
}

BOOST_AUTO_TEST_CASE(reading_a_part_touches_only_its_bytes,
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

BOOST_AUTO_TEST_CASE(without_commit_the_old_dump_stays_and_nothing_else) {
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
pid_t start_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = body();
    } catch (...) {
      status = 98;
    }
    ::_exit(status);
  }
  return child;
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

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

/// Kills this process, whatever it is doing then. @return false when there is no such timer.
bool die_after(std::chrono::nanoseconds delay) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer{};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(delay);
  itimerspec when{};
  when.it_value.tv_sec = seconds.count();
  when.it_value.tv_nsec = (delay - seconds).count();
  return ::timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 &&
         ::timer_settime(timer, 0, &when, nullptr) == 0;
}

BOOST_AUTO_TEST_CASE(a_writer_killed_at_any_point_leaves_the_old_or_a_new_dump_whole) {
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

BOOST_AUTO_TEST_CASE(eight_threads_write_and_read_eight_files) {
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

BOOST_AUTO_TEST_CASE(a_description_counts_what_is_there) {
  const TemporaryFolder folder;
  const auto file = folder / "d.h5";
  const Problem problem =
      Problem::make({moved("a", {6, 4}, DType::bf16, 2, 2), moved("b", {6, 4}, DType::bf16, 2, 2)});
  {
    DumpWriter dump(file);
    dump.experiment({{"config", "[run]\nseveral = lines\n"}, {"transport", "loopback"}});
    dump.problem(problem);
    dump.plan(first_holders(problem), problem);
    dump.round(0, {1, 0.25, 0, {}});
    dump.round(1, {1, 0.5, 0, {}});
    dump.round(1, {2, 0.125, 0, {}});
    for (const Parameter& parameter : problem.parameters()) {
      write_side(dump, parameter, Role::destination);
    }
    dump.stitch(Role::destination);
    dump.commit();
  }
  const auto json = boost::json::parse(describe_dump(file, true));
  BOOST_TEST(json.at("kind").as_string() == "dump");
  BOOST_TEST(json.at("schema_version").to_number<int>() == 1);
  BOOST_TEST(json.at("parameters").to_number<int>() == 2);
  BOOST_TEST(json.at("parameter_bytes").to_number<int>() == 96);
  BOOST_TEST(json.at("plan").at("regions").to_number<int>() == 8);
  BOOST_TEST(json.at("plan").at("messages").to_number<int>() == 4);
  BOOST_TEST(json.at("plan").at("bytes").to_number<int>() == 96);
  BOOST_TEST(json.at("plan").at("max_egress_bytes").to_number<int>() == 48);
  BOOST_TEST(json.at("rounds").to_number<int>() == 2);
  BOOST_TEST(json.at("slowest_seconds").to_number<double>() == 0.5);
  BOOST_TEST(json.at("shards").as_array().size() == 2U);
  BOOST_TEST(json.at("shards").at(0).at("bytes").to_number<int>() == 48);
  BOOST_TEST(json.at("tensors").to_number<int>() == 2);
  BOOST_TEST(json.at("experiment").at("transport").as_string() == "loopback");
  const std::string table = describe_dump(file, false);
  for (const char* part : {"dump of m2n, schema 1", "transport", "loopback", "2, 96 B, 2 layouts",
                           "8 regions, 96 B between 4 pairs of ranks", "destination rank 2",
                           "2 shards, 48 B", "2, the slowest took 0.5 s", "22 B of text"}) {
    BOOST_TEST(contains(table, part), table << "\nlacks " << part);
  }
  expect_error(Errc::io, {"none"}, [&] { describe_dump(folder / "none", false); });
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

/// Last: everything above has run.
BOOST_AUTO_TEST_CASE(hdf5_printed_nothing) {
  const std::string text = Watched::watch->so_far();
  BOOST_TEST(!contains(text, "HDF5-DIAG"), text);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
