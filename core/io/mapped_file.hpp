// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A file's bytes in memory, paged in as they are touched.

#include <cstddef>
#include <filesystem>
#include <span>

namespace m2n {

/// A read-only mapping of a whole regular file. Move-only; the bytes keep their address.
/// The file must not shrink meanwhile: touching a page that is gone ends the process (SIGBUS).
/// Replacing it by a rename is safe.
class MappedFile {
 public:
  /// @throws Error{io} with the path when it cannot be opened or is not a regular file.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace m2n
