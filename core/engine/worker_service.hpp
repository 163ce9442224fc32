// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The workers of a deployment as processes of their own: worker 0 answers the control plane, and
/// passes every call on.

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/control/control.hpp"
#include "core/engine/deployment.hpp"
#include "core/engine/worker_engine.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n {

/// - Collective: run(), by every worker of the deployment.
/// - Threads: run() in one thread a worker; the handler, stop() and abort() from any thread.
/// - Memory: the engine is a loan.
/// - Streams: none.
/// - Errors: run() throws Error naming the workers that have left or do not answer; calls of the
///   handler that are under way then fail with the same text.
class WorkerService final {
 public:
  /// @param deployment  The workers alone, by number; worker 0's process keeps its store.
  WorkerService(WorkerEngine& engine, std::unique_ptr<WorldGroup> deployment);
  WorkerService(const WorkerService&) = delete;
  WorkerService& operator=(const WorkerService&) = delete;
  ~WorkerService();

  /// What the control plane calls. Of worker 0 alone; null on the others. May outlive this.
  std::shared_ptr<ControlHandler> handler() const;

  /// @p check runs on every worker after each call that went well there, in run()'s thread; what it
  /// throws is an error of that worker in the call. Before run().
  void after_call(std::function<void(ControlCall, const boost::json::object& body)> check) {
    after_call_ = std::move(check);
  }

  /// Takes calls until stop() of worker 0. Idle workers hear from worker 0 at least twice a
  /// deadline, so that one that is stopped is noticed.
  void run();

  /// Worker 0: every worker's run() returns, after the call under way. Others: as abort().
  void stop();
  /// Every worker's run() throws.
  void abort(const std::string& reason) noexcept;

 private:
  class Desk;

  void lead();
  void follow();
  Statement run_stated(ControlCall call, const boost::json::object& body);

  WorkerEngine& engine_;
  std::unique_ptr<WorldGroup> group_;
  std::shared_ptr<Desk> desk_;
  std::function<void(ControlCall, const boost::json::object&)> after_call_;
};

}  // namespace m2n
