// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/runtime.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace m2n::nccl_m2n {
namespace {

constexpr std::chrono::seconds kFinalizePatience{30};

/// Communicators outlive the last handle of the process: the library then lets go of what it holds
/// of each of them.
struct Handles {
  std::mutex mutex;
  int count = 0;
  std::vector<std::shared_ptr<nccl::PlainCommunicator>> retired;
};
Handles& handles() {
  static Handles all;
  return all;
}

}  // namespace

Runtime::Runtime(std::shared_ptr<const Library> library, std::shared_ptr<nccl::CallThread> thread,
                 const M2nOptions& options, bool logs)
    : library_(std::move(library)), thread_(std::move(thread)), settings_([&] {
        Settings::Values values = options.variables();
        if (logs) {
          values["NCCL_RESHARD_LOG_LEVEL"] = "DEBUG";
        }
        return values;
      }()) {
  Config config;
  if (options.ctas > 0) {
    config.max_cta = static_cast<int>(options.ctas);
  }
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  library_->require(library_->init(&handle_, &config), "start the library");
  ++all.count;
}

Runtime::~Runtime() {
  std::vector<std::shared_ptr<nccl::PlainCommunicator>> over;
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  if (leaked_) {
    return;  // the count keeps every communicator from now on
  }
  try {
    thread_->run([library = library_, handle = handle_] { library->finalize(handle); },
                 "release its memory", deadline_in(kFinalizePatience));
  } catch (...) {  // stuck: as if leaked
    return;
  }
  if (--all.count == 0) {
    over.swap(all.retired);
  }
}

Connection::~Connection() {
  runtime.reset();
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  if (all.count > 0 && comm) {
    all.retired.push_back(std::move(comm));
  }
}

}  // namespace m2n::nccl_m2n
