// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/loopback/threads.hpp"
#include "transports/loopback/world.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "transports/common/parts.hpp"
#include "transports/common/rank_memory.hpp"

namespace m2n::loopback {
namespace {

/// A region, or a part of one, between two addresses.
struct Task {
  StridedCopy copy;
  const std::byte* source;
  std::byte* destination;
};

/// The most work that a thread takes at a time: large enough to hide the counter, small enough that
/// threads finish together.
constexpr std::uint64_t kTaskBytes = 1 << 20;

/// Cuts a region into tasks of at most kTaskBytes.
void append_tasks(const Task& region, std::vector<Part>& parts, std::vector<Task>& out) {
  parts.clear();
  cut({0, region.copy, 0, 0, 0, bytes_of_copy(region.copy)}, kTaskBytes, parts);
  for (const Part& part : parts) {
    out.push_back({part.copy, region.source + part.source_offset,
                   region.destination + part.destination_offset});
  }
}

/// What the sessions of all ranks share: the work, and how far everyone is.
class SharedRound {
 public:
  explicit SharedRound(std::size_t ranks) : memory(ranks), arrivals_(ranks, 0) {}

  /// A rank reaches its next step. Does not wait.
  void arrive(Rank rank) {
    const std::lock_guard lock(mutex_);
    ++arrivals_[static_cast<std::size_t>(rank)];
    changed_.notify_all();
  }

  /// Waits until every rank has reached step @p step (counted from 1).
  void wait_all(std::uint64_t step, const std::string& phase, Deadline deadline) {
    std::unique_lock lock(mutex_);
    const auto late = [&](std::uint64_t arrival) { return arrival < step; };
    while (true) {
      // Also when everyone is here: after an abort tasks are left undone, and the round must not
      // pass for complete.
      if (aborted_) {
        throw TransportError(Errc::peer_lost, "loopback: a rank gave up in " + phase +
                                                  "; ranks not there yet: " + missing(step));
      }
      if (std::none_of(arrivals_.begin(), arrivals_.end(), late)) {
        return;
      }
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && !aborted_ &&
          std::any_of(arrivals_.begin(), arrivals_.end(), late)) {
        aborted_ = true;
        changed_.notify_all();
        throw TransportError(Errc::timed_out, "loopback: the deadline passed in " + phase +
                                                  "; ranks missing: " + missing(step));
      }
    }
  }

  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  /// The next task of a stage, or nothing when there is none left or the round has ended. Each one
  /// is handed back by done().
  const Task* take(std::size_t stage) {
    busy_.fetch_add(1);
    if (!aborted_) {
      const std::size_t at = stages[stage].next.fetch_add(1, std::memory_order_relaxed);
      if (at < stages[stage].tasks.size()) {
        return &stages[stage].tasks[at];
      }
    }
    busy_.fetch_sub(1);
    return nullptr;
  }
  void done() { busy_.fetch_sub(1); }

  /// Ends the round, and returns when no rank touches anybody's memory any more: at most one task
  /// a rank is under way.
  void abort_and_drain() noexcept {
    abort();
    while (busy_ != 0) {
      std::this_thread::yield();
    }
  }

  struct Stage {
    std::vector<Task> tasks;
    std::atomic<std::size_t> next{0};
  };

  std::vector<RankMemory> memory;
  std::vector<Stage> stages;  ///< Sized before the ranks fill it.
  std::mutex filling;         ///< Guards stages while the ranks add their tasks.
  std::uint64_t bytes = 0;    ///< Of one round, all ranks.

 private:
  std::string missing(std::uint64_t step) const {
    std::string text;
    for (std::size_t rank = 0; rank < arrivals_.size(); ++rank) {
      if (arrivals_[rank] < step) {
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    return text.empty() ? "none" : text;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> arrivals_;  // steps reached, by rank
  std::atomic<bool> aborted_ = false;
  std::atomic<std::size_t> busy_ = 0;  // tasks taken and not done
};

/// Hands a task back, however it ends.
struct TaskEnd {
  SharedRound& shared;
  ~TaskEnd() { shared.done(); }
};

class ThreadSession final : public Session {
 public:
  ThreadSession(std::shared_ptr<SharedRound> shared, const Program& program)
      : shared_(std::move(shared)),
        rank_(program.rank),
        report_(expected_report(program, "memory")) {}

  /// The caller may free its buffers afterwards, also in the middle of a round.
  ~ThreadSession() override {
    if (running_) {
      shared_->abort_and_drain();
    }
  }

  void start(std::uint64_t version, Deadline) override {
    report_.version = version;
    running_ = true;
    started_ = std::chrono::steady_clock::now();
    shared_->arrive(rank_);
    ++step_;
  }

  RoundReport wait(Deadline deadline) override {
    shared_->wait_all(step_, "round start", deadline);
    const bool bypass_cache = shared_->bytes >= kBypassBytes;
    for (std::size_t stage = 0; stage < shared_->stages.size(); ++stage) {
      while (const Task* task = shared_->take(stage)) {
        const TaskEnd end{*shared_};
        copy_region(task->copy, task->source, task->destination, bypass_cache);
      }
      shared_->arrive(rank_);
      ++step_;
      shared_->wait_all(step_, "stage " + std::to_string(stage), deadline);
    }
    // Nobody takes from a stage any more once all have left the last one; the next round starts
    // only after every rank has come here again.
    shared_->arrive(rank_);
    ++step_;
    shared_->wait_all(step_, "round end", deadline);
    for (SharedRound::Stage& stage : shared_->stages) {
      stage.next.store(0, std::memory_order_relaxed);
    }
    running_ = false;
    report_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
    return report_;
  }

  void abort() noexcept override { shared_->abort(); }

 private:
  std::shared_ptr<SharedRound> shared_;
  Rank rank_;
  std::uint64_t step_ = 0;
  bool running_ = false;
  std::chrono::steady_clock::time_point started_;
  RoundReport report_;
};

/// One SharedRound for all ranks: rank 0 makes it, the others copy the pointer.
std::shared_ptr<SharedRound> share(Group& group, std::uint32_t stage_count, Deadline deadline) {
  std::shared_ptr<SharedRound> shared;
  if (group.rank() == 0) {
    shared = std::make_shared<SharedRound>(static_cast<std::size_t>(group.size()));
    shared->stages = std::vector<SharedRound::Stage>(stage_count);
  }
  const std::string address = std::to_string(reinterpret_cast<std::uintptr_t>(&shared));
  const std::vector<std::string> all = group.all_gather("loopback share", address, deadline);
  if (group.rank() != 0) {
    shared = *reinterpret_cast<std::shared_ptr<SharedRound>*>(std::stoull(all[0]));
  }
  group.barrier("loopback shared", deadline);
  expects(shared->stages.size() == stage_count, "the same plan on every rank");
  return shared;
}

}  // namespace

std::unique_ptr<Session> prepare_in_threads(Group& group, const Program& program,
                                            const Buffers& buffers, Deadline deadline) {
  const std::shared_ptr<SharedRound> shared = share(group, program.stage_count, deadline);
  RankMemory& mine = shared->memory[static_cast<std::size_t>(program.rank)];
  mine.buffers = buffers;
  mine.scratch.resize(program.scratch_bytes);
  group.barrier("loopback buffers", deadline);

  // The receiver brings the work; any rank does it.
  std::vector<std::vector<Task>> tasks(program.stage_count);
  std::vector<Part> parts;
  std::uint64_t bytes = 0;
  for (const auto* regions : {&program.receives, &program.copies}) {
    for (const Region& region : *regions) {
      RankMemory& from = shared->memory[static_cast<std::size_t>(region.from.rank)];
      append_tasks({region.copy, from.address(region.from), mine.address(region.to)}, parts,
                   tasks[region.stage]);
      bytes += region.bytes;
    }
  }
  {
    const std::lock_guard lock(shared->filling);
    for (std::size_t stage = 0; stage < tasks.size(); ++stage) {
      auto& all = shared->stages[stage].tasks;
      all.insert(all.end(), tasks[stage].begin(), tasks[stage].end());
    }
    shared->bytes += bytes;
  }
  group.barrier("loopback prepare", deadline);
  return std::make_unique<ThreadSession>(shared, program);
}

}  // namespace m2n::loopback
