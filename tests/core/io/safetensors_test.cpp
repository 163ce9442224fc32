// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/safetensors.hpp"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <functional>
#include <ostream>
#include <random>

#include "core/error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

using testing::read_file;
using testing::TemporaryFolder;

/// A file of header length, @p header and @p data.
std::string file_of(const std::string& header, const std::string& data) {
  std::string bytes;
  for (unsigned i = 0; i < 8; ++i) {
    bytes += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  }
  return bytes + header + data;
}

/// One tensor of a header: `"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}`.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

const std::string kGood = entry("a", "U8", "[4]", "[0,4]");

/// True when @p text holds every part of @p parts, which are separated by '|'.
bool contains_all(std::string_view text, std::string_view parts) {
  while (!parts.empty()) {
    const std::size_t end = std::min(parts.find('|'), parts.size());
    if (text.find(parts.substr(0, end)) == std::string_view::npos) {
      return false;
    }
    parts.remove_prefix(std::min(end + 1, parts.size()));
  }
  return true;
}

/// Checks that @p body throws Error{@p code} whose text holds every one of @p parts ('|' between
/// them).
void check_refused(const std::function<void()>& body, Errc code, const std::string& parts) {
  BOOST_CHECK_EXCEPTION(body(), Error, [&](const Error& error) {
    BOOST_TEST(to_string(error.code()) == to_string(code));
    BOOST_TEST_CONTEXT(error.what()) { BOOST_TEST(contains_all(error.what(), parts)); }
    return true;
  });
}

/// Tensors with random bytes, and the memory that they point to.
class RandomTensors {
 public:
  explicit RandomTensors(std::uint64_t seed) : random_(seed) {}

  void add(const std::string& name, DType dtype, const Shape& shape) {
    const TensorInfo info{name, dtype, shape};
    std::vector<std::byte>& bytes = memory_.emplace_back(stored_bytes(info));
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random_());
    }
    tensors.push_back({info, bytes.data()});
  }
  std::mt19937_64& random() { return random_; }

  std::vector<TensorToWrite> tensors;

 private:
  std::mt19937_64 random_;
  std::vector<std::vector<std::byte>> memory_;
};

void check_holds(const Checkpoint& checkpoint, const std::vector<TensorToWrite>& tensors) {
  BOOST_TEST(checkpoint.catalogue().size() == tensors.size());
  for (const TensorToWrite& expected : tensors) {
    const StoredTensor& tensor = checkpoint.tensor(expected.info.name);
    BOOST_TEST((tensor.info == expected.info));
    const std::uint64_t bytes = stored_bytes(expected.info);
    BOOST_TEST(tensor.bytes == bytes);
    BOOST_TEST(std::equal(tensor.data, tensor.data + tensor.bytes, expected.data),
               "bits of " << expected.info.name);
  }
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    names.push_back(item.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct MalformedFile {
  const char* why;
  std::string bytes;
  const char* said;  ///< Parts of the message, '|' between them, besides the file's name.
};
std::ostream& operator<<(std::ostream& os, const MalformedFile& row) { return os << row.why; }

MalformedFile with_header(const char* why, const std::string& header, const char* said,
                          std::size_t data_bytes = 4) {
  return {why, file_of(header, std::string(data_bytes, 'x')), said};
}
/// A header with the one tensor 'w', which the message must name.
MalformedFile with_tensor(const char* why, const char* dtype, const char* shape,
                          const char* offsets, const char* said, std::size_t data_bytes = 4) {
  return with_header(why, "{" + entry("w", dtype, shape, offsets) + "}", said, data_bytes);
}

std::string length_only(std::uint64_t length) {
  std::string bytes;
  for (unsigned i = 0; i < 8; ++i) {
    bytes += static_cast<char>((length >> (8 * i)) & 0xff);
  }
  return bytes + "{}";
}

const std::vector<MalformedFile> kMalformedFiles = {
    // The header's length.
    {"empty file", "", "0 bytes|8-byte header length"},
    {"seven bytes", "1234567", "7 bytes|8-byte header length"},
    {"length above the limit", length_only(100'000'001), "100000001|at most 100000000"},
    {"length of 2^64-1", length_only(~std::uint64_t{0}), "18446744073709551615|at most"},
    {"length of the limit, longer than the file", length_only(100'000'000),
     "100000000|2 bytes follow|truncated"},
    {"length one longer than the file", length_only(3), "is 3|2 bytes follow|truncated"},
    {"length 0", file_of("", "xxxx"), "not JSON"},
    // The text.
    with_header("not UTF-8: stray continuation", "{\"\x80\":1}", "not UTF-8|line 1, column 3"),
    with_header("not UTF-8: overlong slash", "{\"\xc0\xaf\":1}", "not UTF-8|line 1, column 3"),
    with_header("not UTF-8: surrogate", "{\"\xed\xa0\x80\":1}", "not UTF-8|line 1, column 3"),
    with_header("not UTF-8: above U+10FFFF", "{\"\xf4\x90\x80\x80\":1}",
                "not UTF-8|line 1, column 3"),
    with_header("not UTF-8: cut at the end", "{}\xe2\x82", "not UTF-8|line 1, column 3"),
    with_header("not JSON", "{" + kGood, "not JSON|line 1, column"),
    with_header("a comment is not JSON", "{/* */" + kGood + "}", "not JSON"),
    with_header("a trailing comma is not JSON", "{" + kGood + ",}", "not JSON"),
    with_header("a second value", "{" + kGood + "} {}", "goes on after"),
    with_header("NUL padding", "{" + kGood + "}" + std::string(3, '\0'), "goes on after"),
    with_header("lone surrogate escape", "{\"\\ud800\":1}", "not JSON"),
    with_header("the header is an array", "[1]", "header is an array|object"),
    with_header("the header is a number", "12", "header is the number 12|object"),
    with_header("the header is null", "null", "header is null|object"),
    with_header("nesting bomb", std::string(100'000, '['), "header is an array"),
    with_header("nesting bomb of objects", "{\"a\":{\"dtype\":{\"a\":{\"a\":{\"a\":{}}}}}}",
                "tensor 'a'|dtype is an object"),
    // Keys. (D16)
    with_header("a tensor twice", "{" + kGood + "," + kGood + "}", "'a' twice"),
    with_header("an empty tensor twice",
                "{" + kGood + "," + entry("z", "U8", "[0]", "[4,4]") + "," +
                    entry("z", "U8", "[0]", "[4,4]") + "}",
                "'z' twice"),
    with_header("a tensor twice, once escaped",
                "{" + kGood + "," + entry("\\u0061", "U8", "[0]", "[4,4]") + "}", "'a' twice"),
    with_header("metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}," + kGood + "}",
                "'__metadata__' twice"),
    with_header("a metadata key twice",
                "{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}," + kGood + "}", "'k' twice"),
    with_header("dtype twice",
                "{\"w\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
                "tensor 'w'|'dtype' twice"),
    with_header("shape twice",
                "{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,4]}}",
                "tensor 'w'|'shape' twice"),
    with_header("data_offsets twice",
                "{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],"
                "\"data_offsets\":[0,4]}}",
                "tensor 'w'|'data_offsets' twice"),
    with_header("unknown key of a tensor",
                "{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"strides\":[1]}}",
                "tensor 'w'|unknown key 'strides'|dtype, shape and data_offsets"),
    with_header("no dtype", "{\"w\":{\"shape\":[4],\"data_offsets\":[0,4]}}",
                "tensor 'w'|no dtype"),
    with_header("no shape", "{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}",
                "tensor 'w'|no shape"),
    with_header("no data_offsets", "{\"w\":{\"dtype\":\"U8\",\"shape\":[4]}}",
                "tensor 'w'|no data_offsets"),
    with_header("nothing about a tensor", "{\"w\":{}}", "tensor 'w'|no dtype"),
    // Names and metadata.
    with_header("a tensor named __metadata__",
                "{" + entry("__metadata__", "U8", "[4]", "[0,4]") + "}",
                "'__metadata__'|an array for the key 'shape'|no tensor can have this name"),
    with_header("metadata holds a number", "{\"__metadata__\":{\"k\":1}," + kGood + "}",
                "'__metadata__'|the number 1 for the key 'k'|strings"),
    with_header("metadata holds null", "{\"__metadata__\":{\"k\":null}," + kGood + "}",
                "'__metadata__'|null for the key 'k'|strings"),
    with_header("metadata holds an object", "{\"__metadata__\":{\"k\":{}}," + kGood + "}",
                "'__metadata__'|an object for the key 'k'|strings"),
    with_header("metadata is a string", "{\"__metadata__\":\"pt\"," + kGood + "}",
                "'__metadata__' is the string 'pt'|object of strings"),
    with_header("NUL in a name", "{" + entry("a\\u0000b", "U8", "[4]", "[0,4]") + "}",
                "'a\\x00b'|control character"),
    with_header("newline in a name", "{" + entry("a\\nb", "U8", "[4]", "[0,4]") + "}",
                "'a\\x0ab'|control character"),
    with_header("DEL in a name", "{" + entry("a\x7f", "U8", "[4]", "[0,4]") + "}",
                "'a\\x7f'|control character"),
    with_header("a long name is cut in the message",
                "{" + entry(std::string(5000, 'n'), "U9", "[4]", "[0,4]") + "}",
                "nnn...'|unknown dtype 'U9'"),
    with_header("a tensor is a string", "{\"w\":\"U8\"}", "tensor 'w'|the string 'U8'"),
    with_header("a tensor is an array", "{\"w\":[0,4]}", "tensor 'w'|an array"),
    // The dtype. (D22)
    with_tensor("dtype in lower case", "u8", "[4]", "[0,4]", "tensor 'w'|unknown dtype 'u8'|BF16"),
    with_tensor("dtype of torch", "F8_E4M3FN", "[4]", "[0,4]",
                "tensor 'w'|unknown dtype 'F8_E4M3FN'"),
    with_tensor("dtype that nobody has", "F128", "[4]", "[0,4]", "tensor 'w'|unknown dtype 'F128'"),
    with_tensor("empty dtype", "", "[4]", "[0,4]", "tensor 'w'|unknown dtype ''"),
    with_header("dtype is a number", "{\"w\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}",
                "tensor 'w'|dtype is the number 8|string"),
    // Numbers.
    with_tensor("negative extent", "U8", "[-4]", "[0,4]", "tensor 'w'|shape holds -4|0 to 2^63-1"),
    with_tensor("negative zero", "U8", "[-0]", "[0,0]", "tensor 'w'|shape holds -0", 0),
    with_tensor("fractional extent", "U8", "[4.0]", "[0,4]", "tensor 'w'|shape holds 4.0"),
    with_tensor("extent with exponent", "U8", "[4e0]", "[0,4]", "tensor 'w'|shape holds 4e0"),
    with_tensor("extent of 2^63", "U8", "[9223372036854775808]", "[0,4]",
                "tensor 'w'|shape holds 9223372036854775808|2^63-1"),
    with_tensor("extent above 64 bits", "U8", "[99999999999999999999]", "[0,4]",
                "tensor 'w'|shape holds 99999999999999999999"),
    with_tensor("extent is a string", "U8", "[\"4\"]", "[0,4]",
                "tensor 'w'|shape holds the string '4'"),
    with_tensor("extent is an array", "U8", "[[4]]", "[0,4]", "tensor 'w'|shape holds an array"),
    with_tensor("shape is a number", "U8", "4", "[0,4]", "tensor 'w'|shape is the number 4|list"),
    with_tensor("shape is null", "U8", "null", "[0,4]", "tensor 'w'|shape is null|list"),
    with_tensor("nine dimensions", "U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]",
                "tensor 'w'|more than 8 dimensions"),
    with_tensor("negative offset", "U8", "[4]", "[-4,0]", "tensor 'w'|data_offsets holds -4"),
    with_tensor("fractional offset", "U8", "[4]", "[0,4.5]", "tensor 'w'|data_offsets holds 4.5"),
    with_tensor("offset above 2^48", "U8", "[4]", "[281474976710657,281474976710661]",
                "tensor 'w'|data_offsets holds 281474976710657|2^48"),
    with_tensor("offset of 2^64-1", "U8", "[4]", "[0,18446744073709551615]",
                "tensor 'w'|data_offsets holds 18446744073709551615"),
    with_tensor("one offset", "U8", "[4]", "[0]",
                "tensor 'w'|data_offsets has 1 numbers|begin and end"),
    with_tensor("no offset", "U8", "[4]", "[]", "tensor 'w'|data_offsets has 0 numbers"),
    with_tensor("three offsets", "U8", "[4]", "[0,2,4]",
                "tensor 'w'|data_offsets has more than two"),
    with_tensor("offsets are an object", "U8", "[4]", "{}", "tensor 'w'|data_offsets is an object"),
    // Sizes.
    with_tensor("end before begin", "U8", "[4]", "[4,0]", "tensor 'w'|end at 0|begin at 4"),
    with_tensor("size below the shape's", "F32", "[2]", "[0,4]",
                "tensor 'w'|[0, 4) hold 4 bytes|f32 [2] takes 8"),
    with_tensor("size above the shape's", "BF16", "[1]", "[0,4]",
                "tensor 'w'|[0, 4) hold 4 bytes|bf16 [1] takes 2"),
    with_tensor("scalar of the wrong size", "F64", "[]", "[0,4]", "tensor 'w'|f64 [] takes 8"),
    with_tensor("bytes for an empty tensor", "F32", "[0,7]", "[0,4]",
                "tensor 'w'|f32 [0, 7] takes 0"),
    with_tensor("product above 64 bits", "I32", "[2,9223372036854775807]", "[0,4]",
                "tensor 'w'|overflows"),
    with_tensor("product that wraps to the range", "U8", "[4294967296,4294967296,4]", "[0,0]",
                "tensor 'w'|overflows", 0),
    with_tensor("product hidden by a zero", "U8", "[0,4294967296,4294967296,4]", "[0,0]",
                "tensor 'w'|overflows", 0),
    with_tensor("bits that are no whole bytes", "F6_E2M3", "[3]", "[0,3]",
                "tensor 'w'|18 bits|whole bytes", 3),
    with_tensor("f4 with an odd last dimension", "F4", "[2,3]", "[0,3]",
                "tensor 'w'|odd last dimension", 3),
    with_tensor("f4 scalar", "F4", "[]", "[0,1]", "tensor 'w'|odd last dimension", 1),
    with_tensor("empty f4 with an odd last dimension", "F4", "[0,3]", "[0,0]",
                "tensor 'w'|odd last dimension", 0),
    with_tensor("f4 counted in storage bytes", "F4", "[2,8]", "[0,16]", "tensor 'w'|takes 8", 16),
    with_tensor("e8m0 counted as two bytes", "F8_E8M0", "[4]", "[0,8]", "tensor 'w'|takes 4", 8),
    // Ranges. (D17, D18)
    with_tensor("first tensor not at 0", "U8", "[4]", "[4,8]", "tensor 'w'|begins at byte 4|at 0",
                8),
    with_header("two names on one range",
                "{" + kGood + "," + entry("b", "U8", "[4]", "[0,4]") + "}",
                "'a' [0, 4)|'b' [0, 4)|overlap"),
    with_header(
        "ranges that overlap in part",
        "{" + entry("a", "U8", "[8]", "[0,8]") + "," + entry("b", "U8", "[8]", "[4,12]") + "}",
        "'a' [0, 8)|'b' [4, 12)|overlap", 12),
    with_header("a hole between tensors",
                "{" + kGood + "," + entry("b", "U8", "[4]", "[8,12]") + "}",
                "tensor 'b'|[4, 8)|no tensor|begin at 4", 12),
    with_header("data without a tensor", "{}", "4 bytes too many"),
    with_header("data after the last tensor",
                "{" + kGood + "," + entry("b", "F32", "[2]", "[4,12]") + "}",
                "4 bytes too many|'b'", 16),
    with_header("a byte short", "{" + kGood + "}", "truncated|take 4|only 3", 3),
};

// What is unusual and yet right.
struct LenientFile {
  const char* why;
  std::string header;
  std::size_t data_bytes;
  Catalogue catalogue;
};
std::ostream& operator<<(std::ostream& os, const LenientFile& row) { return os << row.why; }

const std::vector<LenientFile> kLenientFiles = {
    {"no tensor", "{}", 0, {}},
    {"metadata alone", "{\"__metadata__\":{}}", 0, {}},
    {"white space before the header", " \r\n\t{" + kGood + "}", 4, {{"a", DType::u8, {4}}}},
    {"white space after the header", "{" + kGood + "} \t\r\n ", 4, {{"a", DType::u8, {4}}}},
    {"header order is not offset order",
     "{" + entry("a", "U8", "[3]", "[1,4]") + "," + entry("b", "U8", "[1]", "[0,1]") + "}",
     4,
     {{"b", DType::u8, {1}}, {"a", DType::u8, {3}}}},
    {"an odd address for f64",
     "{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "F64", "[2]", "[1,17]") + " }",
     17,
     {{"a", DType::u8, {1}}, {"b", DType::f64, {2}}}},
    {"empty tensors before, between and after",
     "{" + entry("e2", "F32", "[0,4]", "[4,4]") + "," + entry("e1", "F4", "[0]", "[0,0]") + "," +
         kGood + "," + entry("e3", "I64", "[2,0,3]", "[4,4]") + "}",
     4,
     {{"e1", DType::f4, {0}},
      {"a", DType::u8, {4}},
      {"e2", DType::f32, {0, 4}},
      {"e3", DType::i64, {2, 0, 3}}}},
    {"scalar", "{" + entry("s", "F32", "[]", "[0,4]") + "}", 4, {{"s", DType::f32, {}}}},
    {"eight dimensions",
     "{" + entry("a", "U8", "[1,1,2,1,1,2,1,1]", "[0,4]") + "}",
     4,
     {{"a", DType::u8, {1, 1, 2, 1, 1, 2, 1, 1}}}},
    {"f4 in half the bytes",
     "{" + entry("q", "F4", "[2,8]", "[0,8]") + "}",
     8,
     {{"q", DType::f4, {2, 8}}}},
    {"keys in any order and a name with escapes",
     R"({"\u00e9\"\\":{"data_offsets":[0,4],"shape":[4],"dtype":"BOOL"}})",
     4,
     {{"\u00e9\"\\", DType::boolean, {4}}}},
};

}  // namespace

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(safetensors)

BOOST_DATA_TEST_CASE(a_malformed_file_is_refused_in_its_own_words, bdata::make(kMalformedFiles),
                     row) {
  const TemporaryFolder folder;
  const auto path = folder.write("bad.safetensors", row.bytes);
  check_refused([&] { SafetensorsFile file(path); }, Errc::bad_argument,
                "'" + path.string() + "'|" + row.said);
}

BOOST_DATA_TEST_CASE(an_unusual_file_is_read, bdata::make(kLenientFiles), row) {
  const TemporaryFolder folder;
  std::string data;
  for (std::size_t i = 0; i < row.data_bytes; ++i) {
    data += static_cast<char>('A' + i);
  }
  const Checkpoint checkpoint(folder.write("odd.safetensors", file_of(row.header, data)));
  BOOST_TEST((checkpoint.catalogue() == row.catalogue));
  std::string seen;
  for (const StoredTensor& tensor : checkpoint.files().front().tensors()) {
    seen.append(reinterpret_cast<const char*>(tensor.data), tensor.bytes);
  }
  BOOST_TEST(seen == data);  // offset order is file order
}

BOOST_AUTO_TEST_CASE(metadata_is_kept) {
  const SafetensorsHeader header = parse_safetensors_header(
      R"({"__metadata__":{"format":"pt","note":"a\nb"}})", 0, "m.safetensors");
  const SafetensorsMetadata expected{{"format", "pt"}, {"note", "a\nb"}};
  BOOST_TEST((header.metadata == expected));
}

BOOST_AUTO_TEST_CASE(a_file_that_is_not_there_is_an_io_error) {
  const TemporaryFolder folder;
  check_refused([&] { Checkpoint checkpoint(folder / "no.safetensors"); }, Errc::io,
                "no.safetensors|No such file");
  check_refused([&] { SafetensorsFile file(folder.path()); }, Errc::io, "not a regular file");
}

BOOST_AUTO_TEST_CASE(every_length_but_the_right_one_is_refused) {
  const TemporaryFolder folder;
  const std::string good =
      file_of("{" + kGood + "," + entry("b", "F32", "[2]", "[4,12]") + "}", std::string(12, 'x'));
  for (std::size_t length = 0; length < good.size(); ++length) {
    const auto path = folder.write("cut.safetensors", good.substr(0, length));
    BOOST_CHECK_THROW(SafetensorsFile{path}, Error);
  }
  for (std::size_t more = 1; more < 20; ++more) {
    const auto path = folder.write("long.safetensors", good + std::string(more, '\0'));
    BOOST_CHECK_THROW(SafetensorsFile{path}, Error);
  }
  BOOST_CHECK_NO_THROW(SafetensorsFile{folder.write("good.safetensors", good)});
}

// Oracle: each byte of the data has one owner, and no empty tensor lies inside another.
BOOST_AUTO_TEST_CASE(ranges_are_accepted_exactly_when_they_tile_the_data) {
  int accepted = 0;
  constexpr int kEnd = 4;
  for (int b1 = 0; b1 <= kEnd; ++b1) {
    for (int e1 = b1; e1 <= kEnd; ++e1) {
      for (int b2 = 0; b2 <= kEnd; ++b2) {
        for (int e2 = b2; e2 <= kEnd; ++e2) {
          for (int size = 0; size <= kEnd; ++size) {
            const auto range = [](int b, int e) {
              return "[" + std::to_string(b) + "," + std::to_string(e) + "]";
            };
            const std::string header = "{" + entry("p", "U8", range(e1 - b1, 1), range(b1, e1)) +
                                       "," + entry("q", "U8", range(e2 - b2, 1), range(b2, e2)) +
                                       "}";
            bool tiles = e1 <= size && e2 <= size;
            for (int byte = 0; byte < size; ++byte) {
              const int owners = (b1 <= byte && byte < e1) + (b2 <= byte && byte < e2);
              tiles = tiles && owners == 1;
            }
            tiles = tiles && !(b1 == e1 && b2 < b1 && b1 < e2) && !(b2 == e2 && b1 < b2 && b2 < e1);
            bool loaded = true;
            try {
              parse_safetensors_header(header, static_cast<std::uint64_t>(size), "r");
            } catch (const Error&) {
              loaded = false;
            }
            BOOST_TEST(loaded == tiles, header << " over " << size << " bytes");
            accepted += loaded;
          }
        }
      }
    }
  }
  BOOST_TEST(accepted > 10);
}

struct DtypeCase {
  const char* name;
  DType dtype;
  std::uint64_t bytes_of_2_by_8;
};
std::ostream& operator<<(std::ostream& os, const DtypeCase& row) { return os << row.name; }

// LAYOUTS: bits of each dtype.
const std::vector<DtypeCase> kDtypes = {
    {"BOOL", DType::boolean, 16},
    {"F4", DType::f4, 8},
    {"F6_E2M3", DType::f6_e2m3, 12},
    {"F6_E3M2", DType::f6_e3m2, 12},
    {"U8", DType::u8, 16},
    {"I8", DType::i8, 16},
    {"F8_E5M2", DType::f8_e5m2, 16},
    {"F8_E4M3", DType::f8_e4m3, 16},
    {"F8_E8M0", DType::f8_e8m0, 16},
    {"F8_E4M3FNUZ", DType::f8_e4m3fnuz, 16},
    {"F8_E5M2FNUZ", DType::f8_e5m2fnuz, 16},
    {"I16", DType::i16, 32},
    {"U16", DType::u16, 32},
    {"F16", DType::f16, 32},
    {"BF16", DType::bf16, 32},
    {"I32", DType::i32, 64},
    {"U32", DType::u32, 64},
    {"F32", DType::f32, 64},
    {"C64", DType::c64, 128},
    {"F64", DType::f64, 128},
    {"I64", DType::i64, 128},
    {"U64", DType::u64, 128},
};

BOOST_DATA_TEST_CASE(every_dtype_has_its_name_and_size, bdata::make(kDtypes), row) {
  const std::uint64_t bytes = row.bytes_of_2_by_8;
  const std::string header =
      "{" + entry("w", row.name, "[2,8]", "[0," + std::to_string(bytes) + "]") + "}";
  const SafetensorsHeader parsed = parse_safetensors_header(header, bytes, "d");
  BOOST_TEST((parsed.tensors.at(0).info == TensorInfo{"w", row.dtype, {2, 8}}));
  BOOST_TEST(stored_bytes(parsed.tensors.at(0).info) == bytes);
}

BOOST_AUTO_TEST_CASE(the_dtype_table_above_is_complete) {
  BOOST_TEST(kDtypes.size() == all_dtypes().size());
}

BOOST_AUTO_TEST_CASE(what_is_written_is_read_back_bit_for_bit_and_aligned) {
  RandomTensors random(1);
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    random.add(name + ".matrix", dtype, {4, 8});
    random.add(name + ".empty", dtype, {0, 4});
    random.add(name + ".deep", dtype, {1, 3, 1, 2, 1, 2, 2, 2});
    if (is_byte_sized(dtype)) {
      random.add(name + ".scalar", dtype, {});
      random.add(name + ".odd", dtype, {3, 5, 7});
    }
  }
  random.add("\u00fcml\u00e4ut \"quoted\" \\ /", DType::bf16, {2});
  std::shuffle(random.tensors.begin(), random.tensors.end(), random.random());

  const TemporaryFolder folder;
  const auto path = folder / "all.safetensors";
  const SafetensorsMetadata metadata{{"format", "pt"}, {"k", "line\nline \"x\""}};
  write_safetensors(path, random.tensors, metadata);
  const Checkpoint checkpoint(path);
  check_holds(checkpoint, random.tensors);
  BOOST_TEST((checkpoint.files().front().metadata() == metadata));
  for (const StoredTensor& tensor : checkpoint.files().front().tensors()) {
    const std::uint64_t alignment = std::max<std::uint64_t>(1, bits_of(tensor.info.dtype) / 8);
    BOOST_TEST(reinterpret_cast<std::uintptr_t>(tensor.data) % alignment == 0u);
  }
  BOOST_TEST(names_in(folder.path()) == std::vector<std::string>{"all.safetensors"},
             boost::test_tools::per_element());
}

// The bytes that the reference writer, safetensors 0.8.0 for Python, makes of
//   save({"c": zeros(0, int64), "a": arange(3, uint8), "b": full(1, 0x0707070707070707, int64)},
//        {"format": "pt"})
BOOST_AUTO_TEST_CASE(the_writer_sorts_by_descending_dtype_then_name_and_pads_to_8) {
  const std::string a = std::string("\0\1\2", 3);
  const std::string b(8, '\7');
  const auto data = [](const std::string& s) {
    return reinterpret_cast<const std::byte*>(s.data());
  };
  const std::vector<TensorToWrite> tensors = {{{"c", DType::i64, {0}}, nullptr},
                                              {{"a", DType::u8, {3}}, data(a)},
                                              {{"b", DType::i64, {1}}, data(b)}};
  const TemporaryFolder folder;
  write_safetensors(folder / "o.safetensors", tensors);
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("b":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                       R"("c":{"dtype":"I64","shape":[0],"data_offsets":[8,8]},)"
                       R"("a":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  BOOST_TEST(read_file(folder / "o.safetensors") == file_of(header, b + a));
}

BOOST_AUTO_TEST_CASE(no_tensor_and_no_metadata_make_the_smallest_file) {
  const TemporaryFolder folder;
  write_safetensors(folder / "e.safetensors", {}, {});
  BOOST_TEST(read_file(folder / "e.safetensors") == file_of("{}      ", ""));
}

struct UnwritableCase {
  const char* why;
  std::vector<TensorInfo> tensors;
  const char* said;
};
std::ostream& operator<<(std::ostream& os, const UnwritableCase& row) { return os << row.why; }

const std::vector<UnwritableCase> kUnwritable = {
    {"a name twice", {{"a", DType::u8, {1}}, {"a", DType::i8, {1}}}, "'a' twice"},
    {"an empty tensor's name twice", {{"a", DType::u8, {0}}, {"a", DType::u8, {0}}}, "'a' twice"},
    {"the name of the metadata", {{"__metadata__", DType::u8, {1}}}, "__metadata__"},
    {"a control character", {{"a\tb", DType::u8, {1}}}, "'a\\x09b'|control character"},
    {"a name that is not UTF-8", {{"a\xff", DType::u8, {1}}}, "not UTF-8"},
    {"odd f4", {{"q", DType::f4, {2, 3}}}, "'q'|odd last dimension"},
    {"negative extent", {{"n", DType::u8, {-1}}}, "'n'|negative"},
    {"a size above 64 bits", {{"h", DType::u8, {Index{1} << 40, Index{1} << 40}}}, "'h'|overflows"},
    {"offsets above 2^48", {{"h", DType::u8, {Index{1} << 49}}}, "'h'|2^48"},
    {"sizes that add up to more than 64 bits",
     std::vector<TensorInfo>(17, {"h", DType::u8, {Index{1} << 60}}), "file size"},
};

BOOST_DATA_TEST_CASE(what_no_reader_takes_is_not_written, bdata::make(kUnwritable), row) {
  const TemporaryFolder folder;
  folder.write("old.safetensors", "old");
  const std::byte memory[8] = {};
  std::vector<TensorToWrite> tensors;
  for (const TensorInfo& info : row.tensors) {
    tensors.push_back({info, memory});
  }
  check_refused([&] { write_safetensors(folder / "old.safetensors", tensors, {}); },
                Errc::bad_argument, row.said);
  BOOST_TEST(read_file(folder / "old.safetensors") == "old");
  BOOST_TEST(names_in(folder.path()) == std::vector<std::string>{"old.safetensors"},
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_header_above_the_limit_is_not_written) {
  const TemporaryFolder folder;
  const SafetensorsMetadata metadata{{"k", std::string(kMaxSafetensorsHeaderBytes, 'x')}};
  check_refused([&] { write_safetensors(folder / "h.safetensors", {}, metadata); },
                Errc::bad_argument, "h.safetensors|at most 100000000");
  BOOST_TEST(names_in(folder.path()).empty());
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(sharded_checkpoint)

struct ShardingCase {
  const char* why;
  std::vector<Index> sizes;  ///< Of u8 tensors t0, t1, ... in this order.
  std::uint64_t limit;
  std::vector<std::vector<std::size_t>> shards;  ///< Tensors of each file.
};
std::ostream& operator<<(std::ostream& os, const ShardingCase& row) { return os << row.why; }

const std::vector<ShardingCase> kSharding = {
    {"exactly the limit is one file", {4, 6}, 10, {{0, 1}}},
    {"one above the limit is two", {4, 7}, 10, {{0}, {1}}},
    {"greedy, in order", {4, 4, 4, 2, 9, 1}, 10, {{0, 1}, {2, 3}, {4, 5}}},
    {"a large tensor is alone and ends nothing", {4, 11, 4}, 10, {{1}, {0, 2}}},
    {"only large tensors", {11, 12}, 10, {{0}, {1}}},
    {"empty tensors fit anywhere", {10, 0, 0}, 10, {{0, 1, 2}}},
    {"a limit of zero", {1, 0, 1}, 0, {{0}, {2}, {1}}},
    {"nothing", {}, 10, {{}}},
};

BOOST_DATA_TEST_CASE(files_are_filled_greedily_and_none_is_split, bdata::make(kSharding), row) {
  RandomTensors random(7);
  for (std::size_t i = 0; i < row.sizes.size(); ++i) {
    random.add("t" + std::to_string(i), DType::u8, {row.sizes[i]});
  }
  const TemporaryFolder folder;
  write_checkpoint(folder / "new" / "sub", random.tensors, row.limit);
  const Checkpoint checkpoint(folder / "new" / "sub");
  check_holds(checkpoint, random.tensors);
  BOOST_TEST(checkpoint.files().size() == row.shards.size());
  for (std::size_t f = 0; f < row.shards.size(); ++f) {
    std::vector<std::string> expected;
    std::vector<std::string> found;
    for (const std::size_t t : row.shards[f]) {
      expected.push_back("t" + std::to_string(t));
    }
    for (const StoredTensor& tensor : checkpoint.files()[f].tensors()) {
      found.push_back(tensor.info.name);
    }
    std::sort(found.begin(), found.end());
    BOOST_TEST(found == expected, boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(files_and_index_have_the_usual_names) {
  RandomTensors random(7);
  random.add("x", DType::f32, {4});
  random.add("y", DType::f32, {2});
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), random.tensors, 16);
  const std::vector<std::string> expected = {"model-00001-of-00002.safetensors",
                                             "model-00002-of-00002.safetensors",
                                             "model.safetensors.index.json"};
  BOOST_TEST(names_in(folder.path()) == expected, boost::test_tools::per_element());
  BOOST_TEST(read_file(folder / "model.safetensors.index.json") ==
             "{\n  \"metadata\": {\"total_size\": 24},\n  \"weight_map\": {\n"
             "    \"x\": \"model-00001-of-00002.safetensors\",\n"
             "    \"y\": \"model-00002-of-00002.safetensors\"\n  }\n}\n");
  const Checkpoint by_index(folder / "model.safetensors.index.json");
  check_holds(by_index, random.tensors);
}

BOOST_AUTO_TEST_CASE(a_checkpoint_is_replaced_by_a_new_one_of_its_form) {
  const TemporaryFolder folder;
  RandomTensors old_tensors(1);
  old_tensors.add("x", DType::f32, {4});
  old_tensors.add("y", DType::f32, {2});
  write_checkpoint(folder.path(), old_tensors.tensors, 16);
  RandomTensors new_tensors(2);
  new_tensors.add("x", DType::f32, {4});
  new_tensors.add("y", DType::f32, {2});
  new_tensors.add("z", DType::f32, {4});
  write_checkpoint(folder.path(), new_tensors.tensors, 16);
  check_holds(Checkpoint(folder.path()), new_tensors.tensors);
  check_refused([&] { write_checkpoint(folder.path(), new_tensors.tensors); }, Errc::bad_argument,
                "model.safetensors.index.json|remove it");
  check_holds(Checkpoint(folder.path()), new_tensors.tensors);
}

BOOST_AUTO_TEST_CASE(files_are_not_written_beside_a_single_file_that_would_hide_them) {
  const TemporaryFolder folder;
  RandomTensors random(1);
  random.add("x", DType::f32, {4});
  random.add("y", DType::f32, {2});
  write_checkpoint(folder.path(), random.tensors);
  check_refused([&] { write_checkpoint(folder.path(), random.tensors, 16); }, Errc::bad_argument,
                "model.safetensors|remove it");
  BOOST_TEST(names_in(folder.path()).size() == 1u);
}

BOOST_AUTO_TEST_CASE(a_name_in_two_files_is_not_written) {
  const TemporaryFolder folder;
  RandomTensors random(1);
  random.add("x", DType::f32, {4});
  random.add("x", DType::f32, {2});
  check_refused([&] { write_checkpoint(folder.path(), random.tensors, 16); }, Errc::bad_argument,
                "'x'|twice");
  BOOST_TEST(names_in(folder.path()).empty());
}

struct IndexCase {
  const char* why;
  std::string index;
  Errc code;
  const char* said;
};
std::ostream& operator<<(std::ostream& os, const IndexCase& row) { return os << row.why; }

// Beside each index lie one.safetensors with x and y, and two.safetensors with z: 4 bytes each.
const std::string kOne = R"("x":"one.safetensors","y":"one.safetensors")";
const std::string kAll = kOne + R"(,"z":"two.safetensors")";

const std::vector<IndexCase> kBadIndexes = {
    {"not JSON", "{\"weight_map\":", Errc::bad_argument, "not JSON"},
    {"not an object", "[]", Errc::bad_argument, "object"},
    {"no weight_map", "{\"metadata\":{}}", Errc::bad_argument, "weight_map"},
    {"weight_map is a list", "{\"weight_map\":[]}", Errc::bad_argument, "weight_map|object"},
    {"a file is a number", "{\"weight_map\":{\"x\":1}}", Errc::bad_argument, "x|text"},
    {"a tensor twice", "{\"weight_map\":{" + kAll + ",\"z\":\"two.safetensors\"}}",
     Errc::bad_argument, "'z' twice"},
    {"weight_map twice", "{\"weight_map\":{},\"weight_map\":{" + kAll + "}}", Errc::bad_argument,
     "'weight_map' twice"},
    {"a tensor named __metadata__",
     "{\"weight_map\":{" + kAll + ",\"__metadata__\":\"two.safetensors\"}}", Errc::bad_argument,
     "__metadata__"},
    {"a file that is not there", "{\"weight_map\":{" + kAll + ",\"w\":\"three.safetensors\"}}",
     Errc::io, "'three.safetensors'|tensor 'w'|missing"},
    {"a path upwards", "{\"weight_map\":{\"x\":\"../one.safetensors\"}}", Errc::bad_argument,
     "x|'../one.safetensors'|plain file name"},
    {"an absolute path", "{\"weight_map\":{\"x\":\"/one.safetensors\"}}", Errc::bad_argument,
     "'/one.safetensors'|plain file name"},
    {"a path downwards", "{\"weight_map\":{\"x\":\"a/one.safetensors\"}}", Errc::bad_argument,
     "'a/one.safetensors'|plain file name"},
    {"a path of another system", R"({"weight_map":{"x":"a\\one.safetensors"}})", Errc::bad_argument,
     "plain file name"},
    {"the folder above", "{\"weight_map\":{\"x\":\"..\"}}", Errc::bad_argument, "'..'|plain"},
    {"this folder", "{\"weight_map\":{\"x\":\".\"}}", Errc::bad_argument, "'.'|plain"},
    {"no name", "{\"weight_map\":{\"x\":\"\"}}", Errc::bad_argument, "''|plain"},
    {"NUL in a file name", R"({"weight_map":{"x":"one.safetensors\u0000"}})", Errc::bad_argument,
     "'one.safetensors\\x00'|plain"},
    {"a tensor that its file does not have",
     "{\"weight_map\":{" + kAll + ",\"w\":\"two.safetensors\"}}", Errc::bad_argument,
     "'two.safetensors'|no tensor 'w'"},
    {"a tensor of a file that is not listed",
     R"({"weight_map":{"x":"one.safetensors","z":"two.safetensors"}})", Errc::bad_argument,
     "'y'|'one.safetensors'|not listed"},
    {"a tensor in another file than listed",
     R"({"weight_map":{"x":"one.safetensors","y":"two.safetensors","z":"two.safetensors"}})",
     Errc::bad_argument, "'y'|'one.safetensors'|'two.safetensors'"},
    {"a total that is too small",
     "{\"metadata\":{\"total_size\":11},\"weight_map\":{" + kAll + "}}", Errc::bad_argument,
     "total_size is 11|12 bytes"},
    {"a total for two files of which one is listed",
     "{\"metadata\":{\"total_size\":12},\"weight_map\":{" + kOne + "}}", Errc::bad_argument,
     "total_size is 12|8 bytes"},
    {"a negative total", "{\"metadata\":{\"total_size\":-12},\"weight_map\":{" + kAll + "}}",
     Errc::bad_argument, "total_size|whole number"},
    {"a fractional total", "{\"metadata\":{\"total_size\":12.5},\"weight_map\":{" + kAll + "}}",
     Errc::bad_argument, "total_size|whole number"},
    {"a total in words", "{\"metadata\":{\"total_size\":\"12\"},\"weight_map\":{" + kAll + "}}",
     Errc::bad_argument, "total_size|number"},
};

const std::vector<IndexCase> kGoodIndexes = {
    {"no metadata", "{\"weight_map\":{" + kAll + "}}", Errc::io, ""},
    {"a total", "{\"weight_map\":{" + kAll + "},\"metadata\":{\"total_size\":12}}", Errc::io, ""},
    {"a total with a point", "{\"metadata\":{\"total_size\":12.0},\"weight_map\":{" + kAll + "}}",
     Errc::io, ""},
    {"more metadata",
     "{\"metadata\":{\"total_parameters\":99,\"a\":[{}]},\"b\":1,\"weight_map\":{" + kAll + "}}",
     Errc::io, ""},
};

namespace {

std::filesystem::path write_with_index(const TemporaryFolder& folder, const std::string& index) {
  folder.write("one.safetensors", file_of("{" + entry("y", "U8", "[4]", "[0,4]") + "," +
                                              entry("x", "F32", "[]", "[4,8]") + "}",
                                          "yyyyxxxx"));
  folder.write("two.safetensors", file_of("{" + entry("z", "U8", "[4]", "[0,4]") + "}", "zzzz"));
  return folder.write("m.safetensors.index.json", index);
}

}  // namespace

BOOST_DATA_TEST_CASE(an_index_that_disagrees_with_its_files_is_refused, bdata::make(kBadIndexes),
                     row) {
  const TemporaryFolder folder;
  const auto path = write_with_index(folder, row.index);
  const std::string parts = path.string() + "|" + row.said;
  check_refused([&] { Checkpoint checkpoint(path); }, row.code, parts);
  check_refused([&] { Checkpoint checkpoint(folder.path()); }, row.code, parts);
}

BOOST_DATA_TEST_CASE(an_index_that_agrees_with_its_files_is_read, bdata::make(kGoodIndexes), row) {
  const TemporaryFolder folder;
  const Checkpoint checkpoint(write_with_index(folder, row.index));
  // Files by name, tensors by offset.
  const Catalogue expected = {{"y", DType::u8, {4}}, {"x", DType::f32, {}}, {"z", DType::u8, {4}}};
  BOOST_TEST((checkpoint.catalogue() == expected));
  BOOST_TEST(static_cast<char>(*checkpoint.tensor("x").data) == 'x');
  BOOST_TEST(static_cast<char>(*checkpoint.tensor("z").data) == 'z');
  check_refused([&] { (void)checkpoint.tensor("w"); }, Errc::bad_argument,
                "no tensor 'w'|m.safetensors.index.json");
}

BOOST_AUTO_TEST_CASE(a_malformed_file_of_an_index_is_named) {
  const TemporaryFolder folder;
  const auto path = write_with_index(folder, "{\"weight_map\":{" + kAll + "}}");
  folder.write("two.safetensors", file_of("{" + entry("z", "U8", "[4]", "[0,4]") + "}", "zzz"));
  check_refused([&] { Checkpoint checkpoint(path); }, Errc::bad_argument,
                "two.safetensors|truncated");
}

BOOST_AUTO_TEST_CASE(a_folder_that_leaves_a_choice_is_refused) {
  const TemporaryFolder folder;
  check_refused([&] { Checkpoint checkpoint(folder.path()); }, Errc::bad_argument,
                folder.path().string() + "|neither");
  write_with_index(folder, "{\"weight_map\":{" + kAll + "}}");
  folder.write("model.safetensors", file_of("{" + kGood + "}", "aaaa"));
  check_refused([&] { Checkpoint checkpoint(folder.path()); }, Errc::bad_argument,
                "'m.safetensors.index.json'|'model.safetensors'|name the file");
  BOOST_TEST(Checkpoint(folder / "model.safetensors").catalogue().size() == 1u);
  BOOST_TEST(Checkpoint(folder / "m.safetensors.index.json").catalogue().size() == 3u);
}

BOOST_AUTO_TEST_CASE(shards_without_their_index_are_no_checkpoint) {
  const TemporaryFolder folder;
  folder.write("model-00001-of-00002.safetensors", file_of("{" + kGood + "}", "aaaa"));
  check_refused([&] { Checkpoint checkpoint(folder.path()); }, Errc::bad_argument, "neither");
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(safetensors_fuzz)

namespace {

std::uint64_t test_seed() {
  const char* const given = std::getenv("M2N_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
}

const std::vector<std::string> kFuzzHeaders = {
    "{" + kGood + "}",
    "{" + entry("a", "BF16", "[2,2]", "[0,8]") + "," + entry("b", "F32", "[]", "[8,12]") + "," +
        entry("e", "I64", "[0,4]", "[12,12]") + "}",
    "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"\\u00e9\"}," +
        entry("q", "F4", "[1,8]", "[0,4]") + "}   ",
};
const std::vector<std::string> kFuzzTokens = {
    "{",     "}",        "[",
    "]",     ",",        ":",
    "\"",    "\\",       "0",
    "-1",    "1.5",      "4e0",
    "null",  "true",     "\"a\"",
    "[0,4]", "{}",       "18446744073709551616",
    " ",     "\n",       "\\u00",
    "\xc3",  "\xed\xa0", "\"U8\":",
    "[[[[",  "{\"a\":{", "281474976710657",
};

std::string mutated(std::mt19937_64& random) {
  std::string text = kFuzzHeaders[random() % kFuzzHeaders.size()];
  for (std::uint64_t i = random() % 4; i > 0 && !text.empty(); --i) {
    const std::size_t at = random() % text.size();
    const std::size_t length = 1 + random() % 12;
    switch (random() % 5) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, kFuzzTokens[random() % kFuzzTokens.size()]);
        break;
      case 3:
        text.insert(random() % text.size(), text.substr(at, length * 6));
        break;
      default:
        text[at] = static_cast<char>('0' + random() % 10);
        break;
    }
  }
  return text;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_mutated_file_loads_soundly_or_is_refused_by_an_error) {
  const std::uint64_t seed = test_seed();
  BOOST_TEST_MESSAGE("M2N_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  const TemporaryFolder folder;
  int loaded = 0;
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string header = mutated(random);
    const std::uint64_t data_bytes = 4 * (random() % 4);
    BOOST_TEST_CONTEXT("seed " << seed << ", header " << header) {
      try {
        if (i % 20 == 0) {  // through a file, which may have another header length
          std::string bytes = file_of(header, std::string(data_bytes, 'd'));
          if (random() % 2 == 0) {
            bytes[0] = static_cast<char>(random());
          }
          const SafetensorsFile file(folder.write("f.safetensors", bytes));
          for (const StoredTensor& tensor : file.tensors()) {
            const std::string copy(reinterpret_cast<const char*>(tensor.data), tensor.bytes);
            BOOST_REQUIRE(bytes.find(copy) != std::string::npos);  // every byte can be read
          }
        }
        std::uint64_t end = 0;
        for (const auto& tensor :
             parse_safetensors_header(header, data_bytes, "f.safetensors").tensors) {
          BOOST_REQUIRE(tensor.begin == end);
          BOOST_REQUIRE(tensor.end - tensor.begin == stored_bytes(tensor.info));
          end = tensor.end;
        }
        BOOST_REQUIRE(end == data_bytes);
        ++loaded;
      } catch (const Error& error) {
        BOOST_REQUIRE(error.code() == Errc::bad_argument);
        BOOST_REQUIRE(contains_all(error.what(), "f.safetensors"));
        ++refused;
      }
    }
  }
  BOOST_TEST(loaded > 1000);
  BOOST_TEST(refused > 1000);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
