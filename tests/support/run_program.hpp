// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Runs a program as a person would, and a folder that is gone afterwards.

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

/// A fresh folder under the system's temporary one.
class TemporaryFolder {
 public:
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::filesystem::path& path() const noexcept { return path_; }
  /// Writes a file in it. @return its path.
  std::filesystem::path write(const std::string& name, const std::string& text) const;
  /// Names of everything in it, sorted.
  std::vector<std::string> list() const;

 private:
  std::filesystem::path path_;
};

}  // namespace m2n::testing
