// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/thread_group.hpp"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/rendezvous/rank_list.hpp"

namespace m2n {
namespace {

/// One all-gather of all ranks.
struct Exchange {
  explicit Exchange(std::size_t size) : values(size) {}

  std::string phase;
  std::vector<std::optional<std::string>> values;
  std::size_t arrived = 0;
  bool complete = false;
};

struct ThreadWorld {
  explicit ThreadWorld(std::size_t ranks) : left(ranks, false), current(new Exchange(ranks)) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> left;
  std::shared_ptr<Exchange> current;
};

/// The ranks for which @p picked holds, as in sentences.
template <class Picked>
std::string list_ranks_where(std::size_t size, Picked picked) {
  std::vector<Rank> ranks;
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (picked(rank)) {
      ranks.push_back(static_cast<Rank>(rank));
    }
  }
  return list_ranks(ranks);
}

class ThreadGroup final : public Group {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, Rank rank)
      : world_(std::move(world)), rank_(rank) {}

  ~ThreadGroup() override {
    const std::lock_guard lock(world_->mutex);
    world_->left[static_cast<std::size_t>(rank_)] = true;
    world_->changed.notify_all();
  }

  Rank rank() const noexcept override { return rank_; }
  Rank size() const noexcept override { return static_cast<Rank>(world_->left.size()); }
  bool in_process() const noexcept override { return true; }

  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    const std::shared_ptr<const Exchange> exchange = meet(phase, value, deadline);
    std::vector<std::string> values;
    values.reserve(exchange->values.size());
    for (const std::optional<std::string>& entry : exchange->values) {
      values.push_back(*entry);
    }
    return values;
  }

  std::string broadcast(std::string_view phase, Rank root, std::string_view value,
                        Deadline deadline) override {
    expects(root >= 0 && root < size(), "a root of this world");
    const std::string_view mine = rank_ == root ? value : std::string_view();
    return *meet(phase, mine, deadline)->values[static_cast<std::size_t>(root)];
  }

  void barrier(std::string_view phase, Deadline deadline) override { meet(phase, {}, deadline); }

 private:
  /// Every rank's value, which nobody changes any more.
  std::shared_ptr<const Exchange> meet(std::string_view phase, std::string_view value,
                                       Deadline deadline) {
    std::unique_lock lock(world_->mutex);
    const std::shared_ptr<Exchange> exchange = world_->current;
    if (exchange->arrived == 0) {
      exchange->phase = phase;
    } else if (exchange->phase != phase) {
      throw Error(Errc::peer_lost, "rank " + std::to_string(rank_) + " is in phase '" +
                                       std::string(phase) + "' while others are in '" +
                                       exchange->phase + "'; ranks must agree on the order");
    }
    exchange->values[static_cast<std::size_t>(rank_)] = value;
    if (++exchange->arrived == exchange->values.size()) {
      exchange->complete = true;
      world_->current = std::make_shared<Exchange>(exchange->values.size());
      world_->changed.notify_all();
    }
    const auto missing = [&](std::size_t rank) { return !exchange->values[rank].has_value(); };
    while (!exchange->complete) {
      const std::string gone = list_ranks_where(exchange->values.size(), [&](std::size_t rank) {
        return missing(rank) && world_->left[rank];
      });
      if (!gone.empty()) {
        throw Error(Errc::peer_lost,
                    "phase '" + std::string(phase) + "': ranks that have left: " + gone);
      }
      if (world_->changed.wait_until(lock, deadline) == std::cv_status::timeout &&
          !exchange->complete) {
        throw Error(Errc::timed_out, "phase '" + std::string(phase) +
                                         "': the deadline passed; ranks missing: " +
                                         list_ranks_where(exchange->values.size(), missing));
      }
    }
    return exchange;
  }

  std::shared_ptr<ThreadWorld> world_;
  Rank rank_;
};

}  // namespace

std::vector<std::unique_ptr<Group>> make_thread_groups(Rank size) {
  expects(size > 0, "a world of at least one rank");
  const auto world = std::make_shared<ThreadWorld>(static_cast<std::size_t>(size));
  std::vector<std::unique_ptr<Group>> groups;
  for (Rank rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_unique<ThreadGroup>(world, rank));
  }
  return groups;
}

}  // namespace m2n
