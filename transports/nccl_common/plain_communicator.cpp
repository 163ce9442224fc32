// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_common/plain_communicator.hpp"

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "transports/nccl/communicator.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {
namespace {

constexpr std::chrono::seconds kGiveUpPatience{10};

/// Rank 0's id, once every rank has shown that it runs the same NCCL.
ncclUniqueId agree_on_id(std::string_view who, Group& group, Deadline deadline) {
  ncclUniqueId id{};
  std::string mine = std::to_string(library_version()) + " ";
  if (group.rank() == 0 && ncclGetUniqueId(&id) == ncclSuccess) {
    mine.append(id.internal, sizeof id.internal);
  }
  const std::vector<std::string> all = group.all_gather("nccl communicator id", mine, deadline);
  const std::string version = all[0].substr(0, all[0].find(' '));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string other = all[rank].substr(0, all[rank].find(' '));
    if (other != version) {
      throw TransportError(Errc::bad_argument, std::string(who) + ": rank " + std::to_string(rank) +
                                                   " runs NCCL " + other + " and rank 0 runs " +
                                                   version + ", expected one version everywhere");
    }
  }
  const std::string body = all[0].substr(version.size() + 1);
  if (body.size() != sizeof id.internal) {
    throw TransportError(Errc::unavailable,
                         std::string(who) + ": rank 0 could not make a communicator id");
  }
  std::memcpy(id.internal, body.data(), body.size());
  return id;
}

}  // namespace

void require_nccl(ncclResult_t result, const std::string& doing, ncclComm_t comm) {
  if (result == ncclSuccess) {
    return;
  }
  std::string text = "nccl: " + doing + ": " + ncclGetErrorString(result);
  const char* detail = comm != nullptr ? ncclGetLastError(comm) : nullptr;
  if (detail != nullptr && *detail != '\0') {
    text += std::string(" (") + detail + ")";
  }
  throw TransportError(Errc::peer_lost, text);
}

PlainCommunicator::PlainCommunicator(std::string_view who, Group& group,
                                     std::shared_ptr<CallThread> thread, int max_cta,
                                     Deadline deadline)
    : thread_(std::move(thread)) {
  check(cudaGetDevice(&device_), "read the current device");
  const ncclUniqueId id = agree_on_id(who, group, deadline);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (max_cta > 0) {
    config.minCTAs = 1;
    config.maxCTAs = max_cta;
  }
  const int size = group.size();
  const int rank = group.rank();
  thread_->run(
      [made = made_, id, config, size, rank]() mutable {
        require_nccl(ncclCommInitRankConfig(&made->comm, size, id, rank, &config),
                     "create the communicator", nullptr);
      },
      "create the communicator", deadline);
}

PlainCommunicator::PlainCommunicator(const PlainCommunicator& whole, bool member, Deadline deadline)
    : thread_(whole.thread_), device_(whole.device_) {
  thread_->run(
      [made = made_, whole = whole.handle(), member] {
        require_nccl(ncclCommSplit(whole, member ? 0 : NCCL_SPLIT_NOCOLOR, 0, &made->comm, nullptr),
                     "split the communicator", whole);
      },
      "split the communicator", deadline);
}

PlainCommunicator::~PlainCommunicator() { abort(); }

void PlainCommunicator::poll() const {
  ncclResult_t state = ncclSuccess;
  if (aborted_) {
    throw TransportError(Errc::peer_lost, "nccl: the communicator was aborted");
  }
  if (made_->comm != nullptr && ncclCommGetAsyncError(made_->comm, &state) == ncclSuccess &&
      state != ncclSuccess && state != ncclInProgress) {
    require_nccl(state, "watch the communicator", made_->comm);
  }
}

void PlainCommunicator::abort() noexcept {
  if (aborted_.exchange(true) || made_->comm == nullptr) {
    return;
  }
  struct State {
    std::mutex mutex;
    std::condition_variable over;
    bool done = false;
  };
  try {
    auto state = std::make_shared<State>();
    std::thread([state, comm = made_->comm, device = device_] {
      cudaSetDevice(device);
      ncclCommAbort(comm);
      const std::lock_guard lock(state->mutex);
      state->done = true;
      state->over.notify_all();
    }).detach();
    std::unique_lock lock(state->mutex);
    state->over.wait_for(lock, kGiveUpPatience, [&] { return state->done; });
  } catch (...) {  // no thread to be had: the communicator is left to the process
  }
}

}  // namespace m2n::nccl
