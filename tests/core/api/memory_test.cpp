// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/memory.hpp"

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <vector>

#include "core/error.hpp"

namespace m2n {
namespace {

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(memory)

BOOST_AUTO_TEST_CASE(a_copy_writes_the_bytes_of_its_source_and_no_others) {
  const Memory& host = memory_of(MemorySpace::host);
  const auto arena = host.reserve(300, 0);
  const LocalBuffer from = arena->take(100);
  const LocalBuffer to = arena->take(150);
  for (std::size_t i = 0; i < 100; ++i) {
    from.data[i] = static_cast<std::byte>(i + 1);
  }
  std::memset(to.data, 0xEE, to.bytes);
  host.copy(from, to);
  BOOST_TEST(std::memcmp(from.data, to.data, 100) == 0);
  for (std::size_t i = 100; i < 150; ++i) {
    BOOST_TEST(std::to_integer<int>(to.data[i]) == 0xEE);
  }
  host.copy({}, to);  // nothing
  BOOST_TEST(std::to_integer<int>(to.data[0]) == 1);
  BOOST_CHECK_THROW(host.copy(to, from), Error);
}

BOOST_AUTO_TEST_CASE(host_memory_knows_about_how_much_is_free) {
  const Memory& host = memory_of(MemorySpace::host);
  const std::uint64_t free = host.free_bytes(0);
  BOOST_TEST(free > 16U << 20);
  BOOST_TEST(free < std::uint64_t{1} << 56);
  BOOST_TEST(!host.description(0).empty());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
