// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/atomic_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

[[noreturn]] void fail(const std::string& action, const std::filesystem::path& path, int error) {
  throw Error(Errc::io, "cannot " + action + " '" + path.string() +
                            "': " + std::generic_category().message(error));
}

std::filesystem::path folder_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

/// Makes a rename in @p folder durable.
void sync_folder(const std::filesystem::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    fail("open the folder", folder, errno);
  }
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  // Some file systems cannot sync a folder and say so by EINVAL; they have nothing to make durable.
  if (error != 0 && error != EINVAL) {
    fail("sync the folder", folder, error);
  }
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& target) : target_(target) {
  std::error_code ignored;
  if (std::filesystem::is_symlink(target_, ignored)) {
    target_ = std::filesystem::weakly_canonical(target_, ignored);
  }
  const std::filesystem::file_status status = std::filesystem::status(target_, ignored);
  if (!target_.has_filename() ||
      (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))) {
    throw Error(Errc::io, "cannot write '" + target.string() + "': it is not a regular file");
  }
  const std::string stem = target_.filename().string() + ".tmp-" + std::to_string(::getpid());
  for (int attempt = 0; descriptor_ < 0; ++attempt) {
    temporary_ = folder_of(target_) / (stem + "-" + std::to_string(attempt));
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) {
      fail("create", temporary_, errno);
    }
  }
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : target_(std::move(other.target_)),
      temporary_(std::move(other.temporary_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    ::unlink(temporary_.c_str());  // nothing useful to do with a failure here
  }
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kLargestCall = std::size_t{1} << 30;  // Linux moves less than 2 GiB a call
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kLargestCall));
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done < 0) {
      fail("write", temporary_, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

void AtomicFile::write(std::string_view text) {
  write(std::as_bytes(std::span(text.data(), text.size())));
}

void AtomicFile::commit() {
  expects(descriptor_ >= 0, "one commit() a file");
  if (::fsync(descriptor_) != 0) {
    fail("sync", temporary_, errno);
  }
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail("rename to its target", temporary_, errno);
  }
  ::close(std::exchange(descriptor_, -1));
  sync_folder(folder_of(target_));
}

}  // namespace m2n
