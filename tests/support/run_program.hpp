// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Runs a program as a person would.

#include <filesystem>
#include <string>
#include <vector>

namespace m2n::testing {

struct Outcome {
  int status = 0;  ///< Exit status; 128 + signal when a signal ended it.
  std::string out;
  std::string err;
};

/// Runs @p words (a path and its arguments), without a shell, in @p folder.
Outcome run_program(const std::vector<std::string>& words, const std::filesystem::path& folder);

}  // namespace m2n::testing
