// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Names and sizes of every element type.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/tensor/dtype.hpp"

namespace bdata = boost::unit_test::data;

namespace m2n {
namespace {

struct DTypeCase {
  DType dtype;
  const char* name;
  const char* safetensors;
  std::uint32_t bits;
};
std::ostream& operator<<(std::ostream& os, const DTypeCase& c) { return os << c.name; }

// Ascending in the writer's order; sizes as in the safetensors specification.
const std::vector<DTypeCase> kDTypeCases = {
    {DType::boolean, "bool", "BOOL", 8},
    {DType::f4, "f4", "F4", 4},
    {DType::f6_e2m3, "f6_e2m3", "F6_E2M3", 6},
    {DType::f6_e3m2, "f6_e3m2", "F6_E3M2", 6},
    {DType::u8, "u8", "U8", 8},
    {DType::i8, "i8", "I8", 8},
    {DType::f8_e5m2, "f8_e5m2", "F8_E5M2", 8},
    {DType::f8_e4m3, "f8_e4m3", "F8_E4M3", 8},
    {DType::f8_e8m0, "f8_e8m0", "F8_E8M0", 8},
    {DType::f8_e4m3fnuz, "f8_e4m3fnuz", "F8_E4M3FNUZ", 8},
    {DType::f8_e5m2fnuz, "f8_e5m2fnuz", "F8_E5M2FNUZ", 8},
    {DType::i16, "i16", "I16", 16},
    {DType::u16, "u16", "U16", 16},
    {DType::f16, "f16", "F16", 16},
    {DType::bf16, "bf16", "BF16", 16},
    {DType::i32, "i32", "I32", 32},
    {DType::u32, "u32", "U32", 32},
    {DType::f32, "f32", "F32", 32},
    {DType::c64, "c64", "C64", 64},
    {DType::f64, "f64", "F64", 64},
    {DType::i64, "i64", "I64", 64},
    {DType::u64, "u64", "U64", 64},
};

BOOST_AUTO_TEST_SUITE(core_tensor)
BOOST_AUTO_TEST_SUITE(dtype)

BOOST_DATA_TEST_CASE(each_type_has_its_names_and_its_size, bdata::make(kDTypeCases), c) {
  BOOST_TEST(to_string(c.dtype) == c.name);
  BOOST_TEST(safetensors_name(c.dtype) == c.safetensors);
  BOOST_TEST((dtype_from_string(c.name) == c.dtype));
  BOOST_TEST((dtype_from_safetensors(c.safetensors) == c.dtype));
  BOOST_TEST(bits_of(c.dtype) == c.bits);
  BOOST_TEST(is_byte_sized(c.dtype) == (c.bits % 8 == 0));
  if (c.bits % 8 == 0) {
    BOOST_TEST(bytes_of(c.dtype) == c.bits / 8);
  }
}

BOOST_AUTO_TEST_CASE(the_list_holds_every_type_once_in_ascending_order) {
  BOOST_TEST_REQUIRE(all_dtypes().size() == kDTypeCases.size());
  for (std::size_t i = 0; i < kDTypeCases.size(); ++i) {
    BOOST_TEST((all_dtypes()[i] == kDTypeCases[i].dtype), kDTypeCases[i].name);
  }
}

BOOST_AUTO_TEST_CASE(packed_types_have_no_size_in_bytes) {
  for (const DType dtype : {DType::f4, DType::f6_e2m3, DType::f6_e3m2}) {
    BOOST_CHECK_EXCEPTION(bytes_of(dtype), Error, [&](const Error& e) {
      return e.code() == Errc::bad_argument &&
             std::string(e.what()).find(to_string(dtype)) != std::string::npos;
    });
  }
}

BOOST_DATA_TEST_CASE(unknown_names_are_refused_with_the_names_that_exist,
                     bdata::make({"", "BF16", "bf16 ", "float32", "boolean", "f8", "f128"}), name) {
  BOOST_CHECK_EXCEPTION(dtype_from_string(name), Error, [&](const Error& e) {
    const std::string text = e.what();
    bool complete = text.find("'" + std::string(name) + "'") != text.npos;
    for (const DTypeCase& c : kDTypeCases) {
      complete = complete && text.find(c.name) != text.npos;
    }
    return e.code() == Errc::bad_argument && complete;
  });
}

BOOST_DATA_TEST_CASE(unknown_safetensors_names_are_refused_with_the_names_that_exist,
                     bdata::make({"", "bf16", "F8", "C128", "Bool"}), name) {
  BOOST_CHECK_EXCEPTION(dtype_from_safetensors(name), Error, [&](const Error& e) {
    const std::string text = e.what();
    bool complete = text.find("'" + std::string(name) + "'") != text.npos;
    for (const DTypeCase& c : kDTypeCases) {
      complete = complete && text.find(c.safetensors) != text.npos;
    }
    return e.code() == Errc::bad_argument && complete;
  });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
