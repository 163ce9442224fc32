// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A deployment that remembers what it was asked, and answers as told.

#include <boost/json/object.hpp>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/control/control.hpp"
#include "core/error.hpp"

namespace m2n::testing {

class FakeHandler final : public ControlHandler {
 public:
  using Hook = std::function<void(const std::string& call, Deadline deadline)>;

  /// Each call runs @p hook, which may throw or wait.
  explicit FakeHandler(Hook hook = {}) : hook_(std::move(hook)) {}

  boost::json::object init_weight_transfer_engine(const boost::json::object& info,
                                                  Deadline deadline) override {
    return asked("init", info, deadline);
  }
  boost::json::object start_weight_update(const boost::json::object& round,
                                          Deadline deadline) override {
    return asked("start", round, deadline);
  }
  boost::json::object update_weights(const boost::json::object& update,
                                     Deadline deadline) override {
    return asked("update", update, deadline);
  }
  boost::json::object finish_weight_update(const boost::json::object& round,
                                           Deadline deadline) override {
    return asked("finish", round, deadline);
  }
  WeightState weight_state() override {
    const std::lock_guard lock(mutex_);
    return state_;
  }

  void set_state(const WeightState& state) {
    const std::lock_guard lock(mutex_);
    state_ = state;
  }
  std::vector<std::pair<std::string, boost::json::object>> calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  boost::json::object asked(const std::string& call, const boost::json::object& body,
                            Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      calls_.emplace_back(call, body);
    }
    if (hook_) {
      hook_(call, deadline);
    }
    return {{"asked", call}};
  }

  Hook hook_;
  std::mutex mutex_;
  WeightState state_;
  std::vector<std::pair<std::string, boost::json::object>> calls_;
};

/// A door that threads wait at until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  /// @return Whether it was open by the deadline.
  bool wait(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// The code and text of the Error that @p call throws.
template <class Call>
std::pair<Errc, std::string> error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {Errc::usage, "nothing was thrown"};
}

}  // namespace m2n::testing
