// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/communicator.hpp"

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {
namespace {

constexpr std::chrono::seconds kAbortPatience{10};

[[noreturn]] void fail(ncclResult_t result, const char* doing, ncclComm_t comm) {
  std::string text = std::string("nccl: ") + doing + ": " + ncclGetErrorString(result);
  const char* detail = comm != nullptr ? ncclGetLastError(comm) : nullptr;
  if (detail != nullptr && *detail != '\0') {
    text += std::string(" (") + detail + ")";
  }
  throw TransportError(Errc::peer_lost, text);
}

}  // namespace

int library_version() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}

Communicator::Communicator(Group& group, int max_cta, Deadline deadline) {
  check(cudaGetDevice(&device_), "read the current device");
  ncclUniqueId id{};
  std::string mine;
  if (group.rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result == ncclSuccess) {
      mine.assign(id.internal, sizeof id.internal);
    }
  }
  // The version travels along: two libraries that differ hang rather than complain.
  mine = std::to_string(library_version()) + " " + mine;
  const std::vector<std::string> all = group.all_gather("nccl communicator id", mine, deadline);
  const std::string version = all[0].substr(0, all[0].find(' '));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string other = all[rank].substr(0, all[rank].find(' '));
    if (other != version) {
      throw TransportError(Errc::bad_argument, "nccl: rank " + std::to_string(rank) +
                                                   " runs NCCL " + other + " and rank 0 runs " +
                                                   version + ", expected one version everywhere");
    }
  }
  const std::string body = all[0].substr(version.size() + 1);
  if (body.size() != sizeof id.internal) {
    throw TransportError(Errc::unavailable, "nccl: rank 0 could not make a communicator id");
  }
  std::memcpy(id.internal, body.data(), body.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (max_cta > 0) {
    config.minCTAs = 1;
    config.maxCTAs = max_cta;
  }
  const ncclResult_t result = ncclCommInitRankConfig(&comm_, static_cast<int>(group.size()), id,
                                                     static_cast<int>(group.rank()), &config);
  try {
    finish(result, "create the communicator", deadline);
  } catch (...) {
    abort();
    throw;
  }
}

Communicator::~Communicator() { abort(); }

void Communicator::finish(ncclResult_t result, const char* doing, Deadline deadline) const {
  // A call may return success and go on behind: the communicator's state decides.
  if (result == ncclSuccess && comm_ != nullptr && !aborted_) {
    result = ncclInProgress;
    ncclCommGetAsyncError(comm_, &result);
  }
  std::uint64_t polls = 0;
  while (result == ncclInProgress) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw TransportError(Errc::timed_out, std::string("nccl: the deadline passed while waiting "
                                                        "for the library to ") +
                                                doing + "; some rank did not come");
    }
    if (++polls > 1000) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (aborted_ || ncclCommGetAsyncError(comm_, &result) != ncclSuccess) {
      fail(ncclInternalError, doing, nullptr);
    }
  }
  if (result != ncclSuccess) {
    fail(result, doing, comm_);
  }
}

void Communicator::poll() const {
  if (aborted_) {
    throw TransportError(Errc::peer_lost, "nccl: the communicator was aborted");
  }
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(comm_, &state) == ncclSuccess && state != ncclSuccess &&
      state != ncclInProgress) {
    fail(state, "watch the communicator", comm_);
  }
}

void Communicator::exchange(std::span<const Message> sends, std::span<const Message> receives,
                            cudaStream_t stream, Deadline deadline) {
  finish(ncclGroupStart(), "start a group", deadline);
  ncclResult_t result = ncclSuccess;
  const auto note = [&](ncclResult_t r) {
    if (r != ncclSuccess && r != ncclInProgress && result == ncclSuccess) {
      result = r;
    }
  };
  for (const Message& m : sends) {
    note(ncclSend(reinterpret_cast<const void*>(m.address), m.bytes, ncclUint8,
                  static_cast<int>(m.peer), comm_, stream));
  }
  for (const Message& m : receives) {
    note(ncclRecv(reinterpret_cast<void*>(m.address), m.bytes, ncclUint8, static_cast<int>(m.peer),
                  comm_, stream));
  }
  const ncclResult_t end = ncclGroupEnd();
  if (result != ncclSuccess) {
    fail(result, "queue sends and receives", comm_);
  }
  finish(end, "queue sends and receives", deadline);
}

void Communicator::abort() noexcept {
  if (comm_ == nullptr || aborted_.exchange(true)) {
    return;
  }
  // ncclCommAbort can itself wait for a library thread: it gets a thread of its own and a limit.
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  try {
    const auto done = std::make_shared<Done>();
    std::thread([done, comm = comm_, device = device_] {
      cudaSetDevice(device);
      ncclCommAbort(comm);
      const std::lock_guard lock(done->mutex);
      done->over = true;
      done->changed.notify_all();
    }).detach();
    std::unique_lock lock(done->mutex);
    done->changed.wait_for(lock, kAbortPatience, [&] { return done->over; });
  } catch (...) {
    // No thread to be had: the communicator is left to the end of the process.
  }
}

}  // namespace m2n::nccl
