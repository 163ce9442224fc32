// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How many random cases a test tries, and from which seed.

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace m2n::testing {

/// 20,000, or what the environment says: sanitized code is many times slower.
inline std::uint64_t random_cases() {
  const char* const given = std::getenv("M2N_TEST_CASES");  // NOLINT(concurrency-mt-unsafe)
  return given != nullptr ? std::strtoull(given, nullptr, 10) : 20'000;
}

/// M2N_TEST_SEED, or a fresh one; printed, so that a failure can be repeated.
inline std::uint64_t test_seed() {
  const char* const given = std::getenv("M2N_TEST_SEED");  // NOLINT(concurrency-mt-unsafe)
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "M2N_TEST_SEED=" << seed << '\n';
  return seed;
}

}  // namespace m2n::testing
