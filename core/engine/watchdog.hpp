// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A thread that ends what its owner is stuck in.

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "core/api/group.hpp"

namespace m2n {

/// Watches one thing at a time: when its deadline passes, or @p failure says that the world has
/// failed, it is ended from the watchdog's thread. The thread starts with the first guard.
///
/// - Threads: guards come and go in one thread; the callbacks run in the watchdog's.
class Watchdog final {
 public:
  /// @param failure  Why the world has failed; empty while it has not. May be empty itself.
  explicit Watchdog(std::function<std::string()> failure);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog();

  /// Calls @p end(why) at most once, unless release() comes first.
  void guard(Deadline deadline, std::function<void(const std::string& why)> end);
  /// Stops watching. When it returns the callback is not running and will not run.
  void release();

 private:
  void run();

  std::function<std::string()> failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(const std::string&)> end_;  // empty: nothing to watch
  Deadline deadline_;
  bool calling_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace m2n
