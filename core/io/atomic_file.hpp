// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Files that appear whole or not at all.

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace m2n {

/// A new file under a temporary name in the folder of its target. Nobody sees the target change
/// before commit(), and a reader of the old target keeps the old bytes.
///
/// - Threads: one thread at a time.
/// - Errors: Error{io} with the path and the system's words.
class AtomicFile {
 public:
  /// Creates the temporary file. A symbolic link as @p target is followed.
  /// @throws Error{io} when the folder is missing or cannot be written to, or when @p target exists
  ///         and is not a regular file.
  explicit AtomicFile(const std::filesystem::path& target);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  /// Removes the temporary file unless commit() has returned.
  ~AtomicFile();

  /// The temporary name. Other libraries may open it by this name and write it themselves; they
  /// must have closed it before commit().
  const std::filesystem::path& path() const noexcept { return temporary_; }
  const std::filesystem::path& target() const noexcept { return target_; }

  /// Appends at the end of what write() has written so far.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);

  /// Makes the bytes durable, gives the file its target's name, and makes that durable.
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace m2n
