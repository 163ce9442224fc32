// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The program under test, in a folder of its own.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n::testing {

inline Outcome m2n(const TemporaryFolder& folder, std::vector<std::string> words) {
  const char* const program = std::getenv("M2N_PROGRAM");  // NOLINT(concurrency-mt-unsafe)
  BOOST_TEST_REQUIRE(program != nullptr, "M2N_PROGRAM names the program under test");
  words.insert(words.begin(), program);
  return run_program(words, folder.path());
}

/// Names of everything in a folder, sorted.
inline std::vector<std::string> list(const TemporaryFolder& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    names.push_back(std::filesystem::relative(entry.path(), folder.path()).string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace m2n::testing
