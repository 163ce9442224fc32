// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/watchdog.hpp"

#include <algorithm>
#include <utility>

namespace m2n {
namespace {

/// How long a failure elsewhere may stay unnoticed: soon at first, then rarely, for the sake of
/// worlds of a thousand ranks on one machine.
constexpr std::chrono::milliseconds kFirstLook{5};
constexpr std::chrono::milliseconds kRareLook{50};

}  // namespace

Watchdog::Watchdog(std::function<std::string()> failure) : failure_(std::move(failure)) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Watchdog::guard(Deadline deadline, std::function<void(const std::string&)> end) {
  const std::lock_guard lock(mutex_);
  deadline_ = deadline;
  end_ = std::move(end);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void Watchdog::release() {
  std::unique_lock lock(mutex_);
  end_ = nullptr;
  changed_.wait(lock, [&] { return !calling_; });
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  auto pause = kFirstLook;
  while (!stop_) {
    if (!end_) {
      pause = kFirstLook;
      changed_.wait(lock);
      continue;
    }
    const Deadline next = std::min(deadline_, deadline_in(pause));
    changed_.wait_until(lock, next, [&] { return stop_ || !end_; });
    if (stop_ || !end_) {
      continue;
    }
    pause = std::min(pause * 2, kRareLook);
    std::string why = failure_ ? failure_() : std::string();
    if (why.empty() && std::chrono::steady_clock::now() >= deadline_) {
      why = "the deadline passed";
    }
    if (why.empty()) {
      continue;
    }
    const auto end = std::exchange(end_, nullptr);
    calling_ = true;
    lock.unlock();
    end(why);
    lock.lock();
    calling_ = false;
    changed_.notify_all();
  }
}

}  // namespace m2n
