// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Two trainers and two workers as processes, one of which fails once.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "core/rendezvous/listen_socket.hpp"
#include "tests/support/engine_job.hpp"

namespace m2n::testing {

struct Fault {
  enum class Kind : std::uint8_t { kill, stop, raise };

  Kind kind = Kind::raise;
  Rank rank = 0;      ///< In the world.
  std::string point;  ///< The phase; of a round, that of version 2.
  std::string transport = "loopback";
};
/// "loopback:kill:2:move".
std::string to_string(const Fault& fault);

/// The addresses of a job, and what each of its processes does. Reports are lines in a pipe:
/// "<rank> failed <milliseconds> <text>", "<rank> recovered <version>", "<rank> broken <text>".
class FaultJob {
 public:
  static constexpr Rank kTrainers = 2;
  static constexpr Rank kWorkers = 2;
  /// Longest that a call may take that a fault elsewhere ends.
  static constexpr std::chrono::milliseconds kBound{60'000};

  explicit FaultJob(const Fault& fault);
  FaultJob(const FaultJob&) = delete;
  FaultJob& operator=(const FaultJob&) = delete;
  ~FaultJob();

  int reports() const { return read_; }

  /// One process's life, after fork(). @param again  It takes the place of one that was killed.
  [[noreturn]] void run(Rank rank, bool again);

 private:
  EngineOptions options(Rank rank, bool faulty);
  void report(Rank rank, const std::string& text) const;
  void be_trainer(Rank rank, bool again);
  void be_worker(Rank worker, bool again);
  bool serve(WorkerEngine& engine, WeightSink& sink, Rank worker, std::uint64_t epoch);
  std::string state_of(const WorkerEngine& engine, WeightSink& sink, Rank worker) const;

  Fault fault_;
  EngineJob job_;
  ListenSocket master_;
  ListenSocket control_;
  ListenSocket meet_;
  int read_ = -1;
  int write_ = -1;
  std::atomic<bool> recovered_ = false;  // this worker, in a new epoch
  std::function<void()> stop_;           // the deployment
  std::mutex stopping_;                  // stop_, since an engine outlives its service
};

}  // namespace m2n::testing
