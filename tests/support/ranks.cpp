// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iostream>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

#include "core/rendezvous/thread_group.hpp"

namespace m2n::testing {
namespace {

constexpr std::size_t kValueBytes = 4 << 20;  // only what is written takes memory

/// What a forked rank shows to the others, and to the process that forked it.
struct Desk {
  struct Slot {
    std::uint64_t bytes;
    std::array<char, kValueBytes> value;
  };
  std::atomic<std::uint64_t> step;
  std::atomic<bool> left;
  std::array<Slot, 2> slots;  // of even and odd steps: nobody is two steps ahead
  std::array<char, 4096> failure;
  int code;  // -1: none
};

/// Memory for @p count desks that children of this process share.
class Desks {
 public:
  explicit Desks(Rank count) : count_(static_cast<std::size_t>(count)) {
    void* const at = ::mmap(nullptr, count_ * sizeof(Desk), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      throw std::bad_alloc();
    }
    desks_ = static_cast<Desk*>(at);
  }
  Desks(const Desks&) = delete;
  Desks& operator=(const Desks&) = delete;
  ~Desks() { ::munmap(desks_, count_ * sizeof(Desk)); }

  std::size_t size() const { return count_; }
  Desk& operator[](std::size_t rank) { return desks_[rank]; }

 private:
  std::size_t count_;
  Desk* desks_ = nullptr;
};

class ForkGroup final : public Group {
 public:
  ForkGroup(Desks& desks, Rank rank) : desks_(desks), rank_(rank) {}
  ~ForkGroup() override { mine().left = true; }

  Rank rank() const noexcept override { return rank_; }
  Rank size() const noexcept override { return static_cast<Rank>(desks_.size()); }
  bool in_process() const noexcept override { return false; }

  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    const std::uint64_t step = mine().step + 1;
    Desk::Slot& slot = mine().slots[step % 2];
    if (value.size() > slot.value.size()) {
      throw Error(Errc::bad_argument, "a value too large for a test");
    }
    std::copy(value.begin(), value.end(), slot.value.begin());
    slot.bytes = value.size();
    mine().step = step;
    std::vector<std::string> all;
    for (std::size_t rank = 0; rank < desks_.size(); ++rank) {
      Desk& other = desks_[rank];
      while (other.step < step) {
        if (other.left && other.step < step) {
          throw Error(Errc::peer_lost, "phase '" + std::string(phase) +
                                           "': ranks that have left: " + std::to_string(rank));
        }
        if (std::chrono::steady_clock::now() > deadline) {
          throw Error(Errc::timed_out,
                      "phase '" + std::string(phase) +
                          "': the deadline passed; ranks missing: " + std::to_string(rank));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      const Desk::Slot& theirs = other.slots[step % 2];
      all.emplace_back(theirs.value.data(), theirs.bytes);
    }
    return all;
  }

  void barrier(std::string_view phase, Deadline deadline) override {
    all_gather(phase, {}, deadline);
  }

 private:
  Desk& mine() { return desks_[static_cast<std::size_t>(rank_)]; }

  Desks& desks_;
  Rank rank_;
};

RankEnd end_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {.failure = error.what(), .code = error.code(), .signal = 0};
  } catch (const std::exception& error) {
    return {.failure = error.what(), .code = std::nullopt, .signal = 0};
  }
  return {};
}

class GroupApart final : public Group {
 public:
  explicit GroupApart(std::unique_ptr<Group> group) : group_(std::move(group)) {}

  Rank rank() const noexcept override { return group_->rank(); }
  Rank size() const noexcept override { return group_->size(); }
  bool in_process() const noexcept override { return false; }
  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    return group_->all_gather(phase, value, deadline);
  }
  void barrier(std::string_view phase, Deadline deadline) override {
    group_->barrier(phase, deadline);
  }

 private:
  std::unique_ptr<Group> group_;
};

std::vector<RankEnd> run_threads(std::vector<std::unique_ptr<Group>> groups,
                                 const std::function<void(Group&)>& body) {
  std::vector<RankEnd> ends(groups.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] {
      ends[rank] = end_of([&] { body(*groups[rank]); });
      groups[rank].reset();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return ends;
}

[[noreturn]] void run_child(Desks& desks, std::size_t rank,
                            const std::function<void(Group&)>& body) {
  Desk& desk = desks[rank];
  {
    ForkGroup group(desks, static_cast<Rank>(rank));
    const RankEnd end = end_of([&] { body(group); });
    desk.code = end.code ? static_cast<int>(*end.code) : -1;
    std::strncpy(desk.failure.data(), end.failure.c_str(), desk.failure.size() - 1);
  }
  std::cout.flush();
  ::_exit(0);  // the parent's destructors are not this process's to run
}

std::vector<RankEnd> run_processes(Rank count, const std::function<void(Group&)>& body) {
  Desks desks(count);
  std::cout.flush();
  std::vector<pid_t> children;
  for (std::size_t rank = 0; rank < desks.size(); ++rank) {
    const pid_t child = ::fork();
    if (child < 0) {
      throw std::runtime_error("cannot fork a rank");
    }
    if (child == 0) {
      run_child(desks, rank, body);
    }
    children.push_back(child);
  }
  std::vector<RankEnd> ends(desks.size());
  for (std::size_t waited = 0; waited < desks.size(); ++waited) {
    int status = 0;
    const pid_t child = ::wait(&status);
    const auto at = std::find(children.begin(), children.end(), child);
    if (at == children.end()) {
      throw std::runtime_error("a child that is no rank");
    }
    const auto rank = static_cast<std::size_t>(at - children.begin());
    Desk& desk = desks[rank];
    desk.left = true;
    RankEnd& end = ends[rank];
    if (WIFSIGNALED(status)) {
      end.signal = WTERMSIG(status);
      end.failure = "ended by signal " + std::to_string(end.signal);
    } else if (WEXITSTATUS(status) != 0) {
      end.failure = "exit status " + std::to_string(WEXITSTATUS(status));
    } else {
      end.failure = desk.failure.data();
      if (desk.code >= 0 && !end.failure.empty()) {
        end.code = static_cast<Errc>(desk.code);
      }
    }
  }
  return ends;
}

}  // namespace

std::ostream& operator<<(std::ostream& os, World world) {
  switch (world) {
    case World::threads:
      return os << "threads";
    case World::threads_apart:
      return os << "threads apart";
    case World::processes:
      break;
  }
  return os << "processes";
}

std::vector<std::unique_ptr<Group>> make_groups_apart(Rank count) {
  std::vector<std::unique_ptr<Group>> groups;
  for (std::unique_ptr<Group>& group : make_thread_groups(count)) {
    groups.push_back(std::make_unique<GroupApart>(std::move(group)));
  }
  return groups;
}

std::vector<RankEnd> run_ranks(World world, Rank count, const std::function<void(Group&)>& body) {
  switch (world) {
    case World::threads:
      return run_threads(make_thread_groups(count), body);
    case World::threads_apart:
      return run_threads(make_groups_apart(count), body);
    case World::processes:
      break;
  }
  return run_processes(count, body);
}

}  // namespace m2n::testing
