// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/values.hpp"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <ostream>
#include <random>

#include "core/api/builtin.hpp"
#include "core/error.hpp"
#include "core/io/safetensors.hpp"
#include "core/tensor/digest.hpp"
#include "tests/support/temporary_folder.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

using testing::TemporaryFolder;

const std::vector<std::string> kKinds = {"safetensors", "synthetic"};

const Catalogue kCatalogue = {
    {"bytes", DType::u8, {5}},         {"matrix", DType::bf16, {3, 4}},
    {"cube", DType::f32, {2, 3, 5}},   {"deep", DType::i64, {2, 1, 3, 2}},
    {"scalar", DType::f64, {}},        {"empty", DType::f16, {0, 4}},
    {"flags", DType::boolean, {2, 2}}, {"rank8", DType::f8_e4m3, {1, 2, 1, 2, 1, 3, 1, 2}},
    {"packed", DType::f4, {2, 8}},
};

/// Bits of element @p index of @p info: what every kind of values must give here.
std::uint64_t expected_bits(const TensorInfo& info, std::uint64_t index) {
  return synthetic_bits(info.dtype, synthetic_seed(info.name), index);
}

/// Writes a file that holds expected_bits() of every tensor; packed ones are zero.
/// Its first tensor has 5 bytes, so that the others lie at odd addresses.
std::filesystem::path write_values(const TemporaryFolder& folder) {
  std::string header = "{";
  std::string data;
  for (const TensorInfo& info : kCatalogue) {
    const std::size_t begin = data.size();
    data.resize(begin + stored_bytes(info));
    if (is_byte_sized(info.dtype)) {
      const std::uint64_t item = bytes_of(info.dtype);
      for (std::uint64_t i = 0; i < stored_bytes(info) / item; ++i) {
        const std::uint64_t bits = expected_bits(info, i);
        std::memcpy(&data[begin + i * item], &bits, item);
      }
    }
    std::string shape = to_string(info.shape);
    header += (header.size() > 1 ? ",\"" : "\"") + info.name + "\":{\"dtype\":\"" +
              std::string(safetensors_name(info.dtype)) + "\",\"shape\":" + shape +
              ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data.size()) +
              "]}";
  }
  header += "}";
  std::string length;
  for (unsigned i = 0; i < 8; ++i) {
    length += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  }
  return folder.write("values.safetensors", length + header + data);
}

std::unique_ptr<TensorValues> make_values(const std::string& kind, const TemporaryFolder& folder) {
  ValuesContext context;
  if (kind == "safetensors") {
    context.options["path"] = write_values(folder).string();
  } else {
    context.catalogue = kCatalogue;
  }
  return builtin_registries().values.create(kind, context);
}

bool says(const Error& error, Errc code, const std::vector<std::string>& parts) {
  bool all = error.code() == code;
  for (const std::string& part : parts) {
    all = all && std::string(error.what()).find(part) != std::string::npos;
  }
  BOOST_TEST(all, to_string(error.code()) << ": " << error.what());
  return all;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(values)

BOOST_DATA_TEST_CASE(values_have_their_name_and_the_whole_catalogue, bdata::make(kKinds), kind) {
  const TemporaryFolder folder;
  const auto values = make_values(kind, folder);
  BOOST_TEST(values->name() == kind);
  BOOST_TEST((values->catalogue() == kCatalogue));
}

// Random boxes into destinations with any order of dimensions, gaps and alignment; what lies
// between the elements is left alone.
BOOST_DATA_TEST_CASE(any_box_is_read_into_any_strides, bdata::make(kKinds), kind) {
  const TemporaryFolder folder;
  const auto values = make_values(kind, folder);
  std::mt19937_64 random(20240229);
  const auto below = [&](Index n) {
    return static_cast<Index>(random() % static_cast<std::uint64_t>(n));
  };
  for (int round = 0; round < 200; ++round) {
    for (const TensorInfo& info : kCatalogue) {
      if (!is_byte_sized(info.dtype)) {
        continue;
      }
      const std::size_t rank = info.shape.size();
      Box box = Box::whole(info.shape);
      for (std::size_t d = 0; d < rank; ++d) {
        box.lo[d] = below(info.shape[d] + 1);
        box.hi[d] = box.lo[d] + below(info.shape[d] - box.lo[d] + 1);
      }
      std::vector<std::size_t> order(rank);
      for (std::size_t d = 0; d < rank; ++d) {
        order[d] = d;
      }
      std::shuffle(order.begin(), order.end(), random);
      Strides strides = Dims::filled(rank, 0);
      Index span = 1 + below(2);
      for (const std::size_t d : order) {
        strides[d] = span;
        span = span * std::max<Index>(1, box.hi[d] - box.lo[d]) + below(3);
      }
      const std::uint64_t item = bytes_of(info.dtype);
      const std::uint64_t shift = random() % 3;
      std::vector<std::byte> memory(shift + static_cast<std::uint64_t>(span) * item,
                                    std::byte{0xa5});
      std::vector<std::byte> expected = memory;
      const Strides global = row_major(info.shape);
      const Shape extents = box.extents();
      for (Index i = 0; i < box.volume(); ++i) {  // i: row-major inside the box
        Index rest = i;
        Index from = 0;
        Index to = 0;
        for (std::size_t d = rank; d-- > 0;) {
          const Index at = rest % extents[d];
          rest /= extents[d];
          from += (box.lo[d] + at) * global[d];
          to += at * strides[d];
        }
        const std::uint64_t bits = expected_bits(info, static_cast<std::uint64_t>(from));
        std::memcpy(&expected[shift + static_cast<std::uint64_t>(to) * item], &bits, item);
      }
      values->read(info.name, box, memory.data() + shift, strides);
      BOOST_TEST_REQUIRE((memory == expected),
                         info.name << " " << to_string(box) << " strides " << to_string(strides));
    }
  }
}

struct BadRead {
  const char* why;
  const char* tensor;
  Box box;
  Strides strides;
  std::vector<std::string> said;
};
std::ostream& operator<<(std::ostream& os, const BadRead& row) { return os << row.why; }

const std::vector<BadRead> kBadReads = {
    {"unknown tensor", "matrx", {{0, 0}, {1, 1}}, {4, 1}, {"'matrx'"}},
    {"box past the end", "matrix", {{0, 0}, {3, 5}}, {5, 1}, {"'matrix'", "[0:3, 0:5]", "[3, 4]"}},
    {"box before the start", "matrix", {{-1, 0}, {1, 4}}, {4, 1}, {"'matrix'", "[3, 4]"}},
    {"end before begin", "matrix", {{2, 0}, {1, 4}}, {4, 1}, {"'matrix'", "[3, 4]"}},
    {"empty box outside", "matrix", {{4, 0}, {4, 4}}, {4, 1}, {"'matrix'", "[3, 4]"}},
    {"box of another rank", "matrix", {{0}, {3}}, {4, 1}, {"'matrix'", "2 dimensions"}},
    {"corners of two ranks", "matrix", {{0, 0}, {3}}, {4, 1}, {"'matrix'", "2 dimensions"}},
    {"strides of another rank", "matrix", {{0, 0}, {3, 4}}, {1}, {"'matrix'", "2 dimensions"}},
    {"box of a scalar", "scalar", {{0}, {1}}, {1}, {"'scalar'", "0 dimensions"}},
    {"elements below a byte", "packed", {{0, 0}, {2, 8}}, {8, 1}, {"'packed'", "f4", "as u8"}},
};

BOOST_DATA_TEST_CASE(a_box_that_cannot_be_read_is_refused_by_name,
                     bdata::make(kKinds) * bdata::make(kBadReads), kind, row) {
  const TemporaryFolder folder;
  const auto values = make_values(kind, folder);
  std::vector<std::byte> memory(64, std::byte{0xa5});
  const std::vector<std::byte> untouched = memory;
  BOOST_CHECK_EXCEPTION(values->read(row.tensor, row.box, memory.data(), row.strides), Error,
                        [&](const Error& e) { return says(e, Errc::bad_argument, row.said); });
  BOOST_TEST((memory == untouched));
}

BOOST_DATA_TEST_CASE(an_unknown_option_is_refused_with_the_choices, bdata::make(kKinds), kind) {
  const ValuesContext context{.options = {{"path", "x"}, {"paht", "x"}}, .catalogue = {}};
  const std::string choices = kind == "safetensors" ? "choices are path" : "take none";
  BOOST_CHECK_EXCEPTION((void)builtin_registries().values.create(kind, context), Error,
                        [&](const Error& e) {
                          return says(e, Errc::usage, {"'" + kind + "'", "'paht'", choices});
                        });
}

BOOST_AUTO_TEST_CASE(safetensors_without_a_path_are_refused) {
  for (const Options& options : {Options{}, Options{{"path", ""}}}) {
    const ValuesContext context{.options = options, .catalogue = {}};
    BOOST_CHECK_EXCEPTION((void)builtin_registries().values.create("safetensors", context), Error,
                          [](const Error& e) { return says(e, Errc::usage, {"'path'"}); });
  }
}

BOOST_AUTO_TEST_CASE(synthetic_tensors_have_different_names_and_possible_shapes) {
  const auto create = [](const Catalogue& catalogue) {
    const ValuesContext context{.options = {}, .catalogue = catalogue};
    (void)builtin_registries().values.create("synthetic", context);
  };
  BOOST_CHECK_EXCEPTION(
      create({{"a", DType::u8, {1}}, {"b", DType::u8, {1}}, {"a", DType::u8, {2}}}), Error,
      [](const Error& e) {
        return says(e, Errc::bad_argument, {"'a'", "twice"});
      });
  BOOST_CHECK_EXCEPTION(create({{"a", DType::u8, {-1}}}), Error,
                        [](const Error& e) { return says(e, Errc::bad_argument, {"'a'"}); });
  BOOST_CHECK_EXCEPTION(create({{"a", DType::u8, {Index{1} << 40, Index{1} << 40}}}), Error,
                        [](const Error& e) { return says(e, Errc::bad_argument, {"'a'"}); });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
