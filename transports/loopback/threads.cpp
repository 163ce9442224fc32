// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/loopback/threads.hpp"
#include "transports/loopback/world.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.hpp"
#include "transports/common/parts.hpp"
#include "transports/loopback/shared_round.hpp"

namespace m2n::loopback {
namespace {

/// The most work that a thread takes at a time: large enough to hide the counter, small enough that
/// threads finish together.
constexpr std::uint64_t kTaskBytes = 1 << 20;

/// Cuts a region into tasks of at most kTaskBytes.
void append_tasks(const Task& region, std::vector<Part>& parts, std::vector<Task>& out) {
  parts.clear();
  cut({0, region.copy, 0, 0, 0, bytes_of_copy(region.copy), 0}, kTaskBytes, parts);
  for (const Part& part : parts) {
    out.push_back({part.copy, region.source + part.source_offset,
                   region.destination + part.destination_offset,
                   region.scales == nullptr ? nullptr : region.scales + part.scale_offset,
                   region.pair});
  }
}

/// Hands a task back, however it ends.
struct TaskEnd {
  SharedRound& shared;
  ~TaskEnd() { shared.done(); }
};

/// Tells a round's times of the pairs whose tasks one thread runs, in the order of the list: the
/// clock is read where the pair changes.
class PairClock {
 public:
  explicit PairClock(std::size_t slot) : slot_(slot) {}
  ~PairClock() { enter(nullptr); }
  PairClock(const PairClock&) = delete;
  PairClock& operator=(const PairClock&) = delete;

  void enter(PairRounds* pair) noexcept {
    if (pair == pair_) {
      return;
    }
    const Clock::time_point now = Clock::now();
    if (pair_ != nullptr) {
      (*pair_)[slot_].add(since_, now);
    }
    pair_ = pair;
    since_ = now;
  }

 private:
  std::size_t slot_;
  PairRounds* pair_ = nullptr;
  Clock::time_point since_;
};

class ThreadSession final : public Session {
 public:
  /// @param shared    With the tasks and links of all ranks.
  /// @param received  The times of the pairs in which this rank receives.
  ThreadSession(std::shared_ptr<SharedRound> shared, const Program& program,
                std::vector<PairRounds*> received, std::uint64_t extra_bytes)
      : shared_(std::move(shared)),
        rank_(program.rank),
        extra_bytes_(extra_bytes),
        report_(expected_report(program, "memory")),
        times_(report_.peers.size()),
        received_(std::move(received)) {
    for (const SharedRound::Link& link : shared_->links[static_cast<std::size_t>(rank_)]) {
      const auto at = std::lower_bound(
          report_.peers.begin(), report_.peers.end(), link.peer,
          [](const PeerTraffic& traffic, Rank peer) { return traffic.peer < peer; });
      times_[static_cast<std::size_t>(at - report_.peers.begin())].push_back(link.times);
    }
  }

  /// The caller may free its buffers afterwards, also in the middle of a round.
  ~ThreadSession() override {
    if (running_) {
      shared_->abort_and_drain();
    }
  }

  void start(std::uint64_t version, Deadline) override {
    report_.version = version;
    running_ = true;
    slot_ = 1 - slot_;
    for (PairRounds* const times : received_) {
      (*times)[slot_].begin();
    }
    started_ = Clock::now();
    shared_->arrive(rank_);
    ++step_;
  }

  RoundReport wait(Deadline deadline) override {
    shared_->wait_all(step_, "round start", deadline);
    const bool bypass_cache = shared_->bytes >= kBypassBytes;
    for (std::size_t stage = 0; stage < shared_->stages.size(); ++stage) {
      PairClock clock(slot_);
      while (const Task* task = shared_->take(stage)) {
        const TaskEnd end{*shared_};
        clock.enter(task->pair);
        copy_region(task->copy, task->source, task->destination, bypass_cache, task->scales);
      }
      clock.enter(nullptr);
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
    tell_times();
    report_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    return report_;
  }

  void abort() noexcept override { shared_->abort(); }
  std::optional<std::uint64_t> extra_bytes() const override { return extra_bytes_; }

 private:
  /// When each peer's bytes moved, either way.
  void tell_times() {
    for (std::size_t i = 0; i < times_.size(); ++i) {
      Clock::time_point first = Clock::time_point::max();
      Clock::time_point last = Clock::time_point::min();
      for (const PairRounds* const times : times_[i]) {
        first = std::min(first, (*times)[slot_].first());
        last = std::max(last, (*times)[slot_].last());
      }
      report_.peers[i].start_seconds = std::chrono::duration<double>(first - started_).count();
      report_.peers[i].end_seconds = std::chrono::duration<double>(last - started_).count();
    }
  }

  std::shared_ptr<SharedRound> shared_;
  Rank rank_;
  std::uint64_t extra_bytes_;
  std::uint64_t step_ = 0;
  std::size_t slot_ = 0;
  bool running_ = false;
  Clock::time_point started_;
  RoundReport report_;
  std::vector<std::vector<PairRounds*>> times_;  // [peer of the report] out and in
  std::vector<PairRounds*> received_;            // those that this rank resets
};

/// Rounds that rank 0 of some world has made, by a number that it can tell the others. An address
/// would be of nothing when it gives up before they come.
class Offers {
 public:
  std::uint64_t add(const std::shared_ptr<SharedRound>& round) {
    const std::lock_guard lock(mutex_);
    std::erase_if(rounds_, [](const auto& entry) { return entry.second.expired(); });
    rounds_.emplace(++last_, round);
    return last_;
  }
  /// Null when its rank 0 has gone.
  std::shared_ptr<SharedRound> find(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto at = rounds_.find(number);
    return at == rounds_.end() ? nullptr : at->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<SharedRound>> rounds_;
  std::uint64_t last_ = 0;
};

/// One SharedRound for all ranks, which rank 0 makes.
std::shared_ptr<SharedRound> share(Group& group, std::uint32_t stage_count, Deadline deadline) {
  static Offers offers;
  std::shared_ptr<SharedRound> shared;
  std::string number;
  if (group.rank() == 0) {
    shared = std::make_shared<SharedRound>(static_cast<std::size_t>(group.size()));
    shared->stages = std::vector<SharedRound::Stage>(stage_count);
    number = std::to_string(offers.add(shared));
  }
  number = group.broadcast("loopback share", 0, number, deadline);
  if (group.rank() != 0) {
    shared = offers.find(std::stoull(number));
  }
  if (!shared) {
    throw TransportError(Errc::peer_lost, "loopback: rank 0 gave up before the others had come");
  }
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
  std::map<Rank, PairRounds*> pairs;
  for (const Region& region : program.receives) {
    pairs.emplace(region.from.rank, nullptr);
  }
  {
    const std::lock_guard lock(shared->filling);
    for (auto& [peer, times] : pairs) {
      times = &shared->times.emplace_back();
      shared->links[static_cast<std::size_t>(peer)].push_back({program.rank, times});
      shared->links[static_cast<std::size_t>(program.rank)].push_back({peer, times});
    }
  }
  for (const auto* regions : {&program.receives, &program.copies}) {
    for (const Region& region : *regions) {
      RankMemory& from = shared->memory[static_cast<std::size_t>(region.from.rank)];
      const auto pair = pairs.find(region.from.rank);
      append_tasks({region.copy, from.address(region.from), mine.address(region.to),
                    from.scales_of(region).data, pair == pairs.end() ? nullptr : pair->second},
                   parts, tasks[region.stage]);
      bytes += region.bytes;
    }
  }
  std::uint64_t extra_bytes = program.scratch_bytes;
  {
    const std::lock_guard lock(shared->filling);
    for (std::size_t stage = 0; stage < tasks.size(); ++stage) {
      extra_bytes += tasks[stage].size() * sizeof(Task);
      auto& all = shared->stages[stage].tasks;
      all.insert(all.end(), tasks[stage].begin(), tasks[stage].end());
    }
    shared->bytes += bytes;
  }
  group.barrier("loopback prepare", deadline);
  std::vector<PairRounds*> received;
  for (const auto& [peer, times] : pairs) {
    received.push_back(times);
  }
  return std::make_unique<ThreadSession>(shared, program, std::move(received), extra_bytes);
}

}  // namespace m2n::loopback
