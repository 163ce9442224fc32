// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& why) {
  throw Error(Errc::io, "cannot open '" + path.string() + "': " + why);
}

std::span<const std::byte> map(int descriptor, const std::filesystem::path& path) {
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) {
    fail(path, std::generic_category().message(errno));
  }
  if (!S_ISREG(status.st_mode)) {
    fail(path, "it is not a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) {
    return {};  // an empty range cannot be mapped
  }
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (address == MAP_FAILED) {
    fail(path, std::generic_category().message(errno));
  }
  return {static_cast<const std::byte*>(address), size};
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: a named pipe without a writer is refused instead of waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    fail(path, std::generic_category().message(errno));
  }
  try {
    bytes_ = map(descriptor, path);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  ::close(descriptor);
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

}  // namespace m2n
