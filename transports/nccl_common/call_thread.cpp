// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_common/call_thread.hpp"

#include <cuda_runtime.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

constexpr std::chrono::microseconds kLook{200};
constexpr std::chrono::seconds kFarewell{10};

class Call final : public Work {
 public:
  explicit Call(std::function<void()> call) : call_(std::move(call)) {}
  void run() override { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace

/// Shared with the thread, which outlives the object when it is stuck.
struct CallThread::State {
  int device = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Work> work;  // under mutex
  std::exception_ptr error;    // under mutex
  bool quit = false;           // under mutex
  bool ended = false;          // under mutex: the thread is over
  std::atomic<bool> busy{false};

  void loop() {
    cudaSetDevice(device);
    while (const std::shared_ptr<Work> next = take()) {
      std::exception_ptr thrown;
      try {
        next->run();
      } catch (...) {
        thrown = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      error = thrown;
      work.reset();
      busy = false;
      changed.notify_all();
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }

  /// The next work; null at the end.
  std::shared_ptr<Work> take() {
    const auto until = std::chrono::steady_clock::now() + kLook;
    while (!busy && std::chrono::steady_clock::now() < until) {
    }
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return quit || work != nullptr; });
    return work;
  }
};

CallThread::CallThread(int device) : state_(std::make_shared<State>()) {
  state_->device = device;
  std::thread([state = state_] { state->loop(); }).detach();
}

CallThread::~CallThread() {
  std::unique_lock lock(state_->mutex);
  state_->quit = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kFarewell, [&] { return state_->ended; });
}

void CallThread::post(std::shared_ptr<Work> work) {
  const std::lock_guard lock(state_->mutex);
  expects(state_->work == nullptr, "one call at a time");
  state_->error = nullptr;
  state_->work = std::move(work);
  state_->busy = true;
  state_->changed.notify_all();
}

bool CallThread::done() {
  if (state_->busy) {
    return false;
  }
  const std::lock_guard lock(state_->mutex);
  if (const std::exception_ptr error = std::exchange(state_->error, nullptr)) {
    std::rethrow_exception(error);
  }
  return true;
}

void CallThread::run(std::function<void()> call, const char* doing, Deadline deadline) {
  post(std::make_shared<Call>(std::move(call)));
  std::unique_lock lock(state_->mutex);
  if (!state_->changed.wait_until(lock, deadline, [&] { return state_->work == nullptr; })) {
    throw TransportError(Errc::timed_out, std::string("nccl: the deadline passed while waiting for "
                                                      "the library to ") +
                                              doing + "; some rank did not come");
  }
  lock.unlock();
  done();
}

}  // namespace m2n::nccl
