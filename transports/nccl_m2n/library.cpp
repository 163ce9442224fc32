// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/library.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.hpp"
#include "transports/nccl_m2n/log.hpp"
#include "transports/nccl_m2n/options.hpp"

namespace m2n::nccl_m2n {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10'000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

/// Files named libnccl.so* that are mapped into this process.
std::set<std::string> loaded_nccls() {
  std::set<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const std::filesystem::path path(info->dlpi_name);
        if (path.filename().string().starts_with("libnccl.so")) {
          static_cast<std::set<std::string>*>(out)->insert(path.string());
        }
        return 0;
      },
      &files);
  return files;
}

void require_nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess || version < kOldestNccl) {
    throw Error(Errc::unavailable,
                std::string(kWho) + ": this process runs NCCL " + version_text(version) +
                    " and NVIDIA's reshard library needs " + version_text(kOldestNccl) +
                    " or newer; start it with LD_LIBRARY_PATH or LD_PRELOAD naming such a "
                    "libnccl.so.2");
  }
}

std::shared_ptr<const Library> open_library(const std::string& path) {
  require_nccl_version();
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    const char* const why = dlerror();  // NOLINT(concurrency-mt-unsafe)
    throw Error(Errc::unavailable,
                std::string(kWho) + ": NVIDIA's reshard library cannot be loaded (" +
                    (why != nullptr ? why : "no reason given") +
                    "), expected libnccl_m2n.so of the Python package nccl-extensions where the "
                    "loader looks, or its path in option library");
  }
  const std::set<std::string> nccls = loaded_nccls();
  if (nccls.size() > 1) {
    throw Error(Errc::unavailable,
                std::string(kWho) + ": two NCCL libraries are loaded in this process, " +
                    *nccls.begin() + " and " + *nccls.rbegin() +
                    "; start it with LD_PRELOAD naming the one that both shall use");
  }
  auto library = std::make_shared<Library>();
  const auto find = [&](auto& function, const char* name) {
    void* const found = dlsym(file, name);
    if (found == nullptr) {
      throw Error(Errc::unavailable, std::string(kWho) + ": " + path + " has no function " + name +
                                         ", expected NVIDIA's reshard library of release 0.2");
    }
    std::memcpy(&function, &found, sizeof found);
  };
  find(library->init, "ncclM2nInit");
  find(library->finalize, "ncclM2nFinalize");
  find(library->reshard, "ncclReshard");
  find(library->group_start, "ncclM2nGroupStart");
  find(library->group_end, "ncclM2nGroupEnd");
  find(library->group_abort, "ncclM2nGroupAbort");
  find(library->last_error, "ncclM2nGetLastError");
  return library;
}

/// The settings in force in this process, and who wants them.
struct InForce {
  std::mutex mutex;
  Settings::Values values;
  std::map<std::string, std::optional<std::string>> former;
  int users = 0;
};
InForce& in_force() {
  static InForce one;
  return one;
}

/// The standard output in the hands of LogCapture.
struct Redirected {
  std::mutex mutex;
  int users = 0;
  int output = -1;  ///< The real one.
  int file = -1;    ///< In memory, in its place.
};
Redirected& redirected() {
  static Redirected one;
  return one;
}

std::string contents(int file) {
  std::string text;
  std::array<char, 4096> part{};
  for (off_t at = 0;;) {
    const ssize_t got = pread(file, part.data(), part.size(), at);
    if (got <= 0) {
      return text;
    }
    text.append(part.data(), static_cast<std::size_t>(got));
    at += got;
  }
}

}  // namespace

std::shared_ptr<const Library> Library::load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Library>> loaded;
  const std::lock_guard lock(mutex);
  std::shared_ptr<const Library>& library = loaded[path];
  if (library == nullptr) {
    library = open_library(path);
  }
  return library;
}

void Library::require(ncclResult_t result, const std::string& doing) const {
  if (result != ncclSuccess) {
    const char* const detail = last_error();
    throw TransportError(Errc::peer_lost, "nccl_m2n: " + doing + ": " + ncclGetErrorString(result) +
                                              (detail != nullptr && *detail != '\0'
                                                   ? std::string(" (") + detail + ")"
                                                   : std::string()));
  }
}

Settings::Settings(const Values& values) {
  InForce& now = in_force();
  const std::lock_guard lock(now.mutex);
  if (now.users > 0 && now.values != values) {
    throw Error(Errc::bad_argument,
                std::string(kWho) +
                    ": another of them in this process has other settings, and the "
                    "library keeps one set a process; expected the same for both");
  }
  if (now.users++ > 0) {
    return;
  }
  now.values = values;
  now.former.clear();
  for (const auto& [name, value] : values) {
    const char* const had = std::getenv(name.c_str());  // NOLINT(concurrency-mt-unsafe)
    now.former[name] = had != nullptr ? std::optional<std::string>(had) : std::nullopt;
    setenv(name.c_str(), value.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
  }
}

Settings::~Settings() {
  InForce& now = in_force();
  const std::lock_guard lock(now.mutex);
  if (--now.users > 0) {
    return;
  }
  for (const auto& [name, value] : now.former) {
    if (value) {
      setenv(name.c_str(), value->c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
    } else {
      unsetenv(name.c_str());  // NOLINT(concurrency-mt-unsafe)
    }
  }
}

LogCapture::LogCapture() {
  Redirected& now = redirected();
  const std::lock_guard lock(now.mutex);
  if (now.users++ > 0) {
    return;
  }
  std::fflush(stdout);
  now.file = memfd_create("m2n-log", MFD_CLOEXEC);
  now.output = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  if (now.file >= 0 && now.output >= 0) {
    dup2(now.file, STDOUT_FILENO);
  }
}

LogCapture::~LogCapture() {
  Redirected& now = redirected();
  const std::lock_guard lock(now.mutex);
  if (--now.users > 0) {
    return;
  }
  std::fflush(stdout);
  if (now.file >= 0 && now.output >= 0) {
    dup2(now.output, STDOUT_FILENO);
    const std::string others = lines_of_others(contents(now.file));
    for (std::size_t at = 0; at < others.size();) {
      const ssize_t put = write(STDOUT_FILENO, others.data() + at, others.size() - at);
      if (put <= 0) {
        break;
      }
      at += static_cast<std::size_t>(put);
    }
  }
  for (int* const descriptor : {&now.file, &now.output}) {
    if (*descriptor >= 0) {
      close(*descriptor);
      *descriptor = -1;
    }
  }
}

std::string LogCapture::text() const {
  Redirected& now = redirected();
  const std::lock_guard lock(now.mutex);
  std::fflush(stdout);
  return now.file >= 0 ? contents(now.file) : std::string();
}

}  // namespace m2n::nccl_m2n
