// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How many random cases a test tries.

#include <cstdint>
#include <cstdlib>

namespace m2n::testing {

/// 20,000, or what the environment says: sanitized code is many times slower.
inline std::uint64_t random_cases() {
  const char* const given = std::getenv("M2N_TEST_CASES");  // NOLINT(concurrency-mt-unsafe)
  return given != nullptr ? std::strtoull(given, nullptr, 10) : 20'000;
}

}  // namespace m2n::testing
