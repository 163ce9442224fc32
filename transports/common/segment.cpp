// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/common/segment.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <fstream>
#include <system_error>

#include "core/error.hpp"

namespace m2n {
namespace {

[[noreturn]] void fail(const std::string& action) {
  throw TransportError(Errc::unavailable,
                       "cannot " + action + ": " + std::generic_category().message(errno));
}

struct flock byte_lock(std::uint64_t index) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(index);
  lock.l_len = 1;
  return lock;
}

}  // namespace

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

Descriptor::~Descriptor() {
  if (raw_ >= 0) {
    ::close(raw_);
  }
}

Mapping::Mapping(const Descriptor& segment, std::uint64_t offset, std::uint64_t bytes)
    : bytes_(bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment.get(),
                          static_cast<off_t>(offset));
  if (at == MAP_FAILED) {
    fail("map " + std::to_string(bytes) + " bytes of shared memory");
  }
  data_ = static_cast<std::byte*>(at);
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

Descriptor create_segment(std::uint64_t bytes) {
  Descriptor segment(::memfd_create("m2n", MFD_CLOEXEC));
  if (segment.get() < 0) {
    fail("create shared memory");
  }
  const int error = ::posix_fallocate(segment.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) {
    errno = error;
    fail("reserve " + std::to_string(bytes) + " bytes of shared memory");
  }
  return segment;
}

Descriptor open_segment(std::int64_t process, int number) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  Descriptor segment(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (segment.get() < 0) {
    fail("open the shared memory of process " + std::to_string(process));
  }
  return segment;
}

std::uint64_t page_aligned(std::uint64_t bytes) {
  static const auto kPage = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + kPage - 1) / kPage * kPage;
}

std::string machine_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space = {};
  const bool known = ::stat("/proc/self/ns/pid", &space) == 0;
  return boot + "/" + (known ? std::to_string(space.st_ino) : "?");
}

void hold_byte(const Descriptor& segment, std::uint64_t index) {
  struct flock lock = byte_lock(index);
  if (::fcntl(segment.get(), F_OFD_SETLK, &lock) != 0) {
    fail("mark a rank as present");
  }
}

bool is_byte_held(const Descriptor& segment, std::uint64_t index) noexcept {
  struct flock lock = byte_lock(index);
  // When the kernel does not tell, the deadline will.
  return ::fcntl(segment.get(), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool wait_on(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
             std::chrono::nanoseconds limit) noexcept {
  if (limit.count() <= 0) {
    return false;
  }
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const struct timespec span = {seconds.count(), (limit - seconds).count()};
  return ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &span, nullptr, 0) == 0 ||
         errno != ETIMEDOUT;
}

void wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace m2n
