// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A file descriptor with an owner.

#include <unistd.h>

#include <utility>

namespace m2n {

/// Move-only; closes what it owns. -1 owns nothing.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int raw) noexcept : raw_(raw) {}
  FileDescriptor(FileDescriptor&& other) noexcept : raw_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~FileDescriptor() {
    if (raw_ >= 0) {
      ::close(raw_);
    }
  }

  int get() const noexcept { return raw_; }
  int release() noexcept { return std::exchange(raw_, -1); }

 private:
  int raw_ = -1;
};

}  // namespace m2n
