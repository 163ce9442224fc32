// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A thread for calls into a library that may never return.

#include <functional>
#include <memory>

#include "core/api/group.hpp"

namespace m2n::nccl {

/// Something to run, kept alive while it runs: also past its owner, when it never ends.
class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;
  virtual void run() = 0;
};

/// Runs one piece of work at a time on a thread of its own, with a device current. The thread looks
/// for work for a moment before it sleeps, so that a round that follows another starts at once.
///
/// - Threads: one caller.
/// - Errors: TransportError{timed_out}; what the work threw.
class CallThread {
 public:
  explicit CallThread(int device);
  /// Leaves a thread behind that does not come back from its call.
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  /// @pre What was posted before is done.
  void post(std::shared_ptr<Work> work);
  /// True once the work is over. Throws what it threw, once.
  bool done();
  /// post() and a wait. @param doing  For the message: "create the communicator".
  void run(std::function<void()> call, const char* doing, Deadline deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace m2n::nccl
