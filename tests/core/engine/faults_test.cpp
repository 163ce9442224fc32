// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The fault matrix: every rank of a job of two trainers and two workers, each a process, is
/// killed, stopped or made to throw in every phase of init and at three points of a round. Every
/// survivor must return with an error that names a phase and the rank at fault, weights must be
/// whole or marked invalid, and a new epoch on the same addresses must work.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>

#include "core/api/builtin.hpp"
#include "tests/support/fault_job.hpp"

namespace m2n {
namespace {

using testing::Fault;
using testing::FaultJob;
using Clock = std::chrono::steady_clock;

/// Cells under way at a time: they mostly wait.
constexpr std::size_t kParallel = 12;
/// Of one cell, all in all, on however slow a machine.
constexpr std::chrono::seconds kCellTime{150};
constexpr Rank kRanks = FaultJob::kTrainers + FaultJob::kWorkers;

/// Numbers in @p text that follow the word "rank" or "ranks", ranges spelled out.
std::vector<Rank> ranks_in(const std::string& text) {
  std::vector<Rank> ranks;
  for (std::size_t at = text.find("rank"); at != text.npos; at = text.find("rank", at + 1)) {
    std::size_t i = text.find_first_of("0123456789", at);
    const std::size_t stop = text.find_first_of("(';", at);
    while (i != text.npos && i < stop) {
      std::size_t used = 0;
      const Rank first = std::stoi(text.substr(i), &used);
      Rank last = first;
      i += used;
      if (i + 1 < text.size() && text[i] == '-' && std::isdigit(text[i + 1]) != 0) {
        last = std::stoi(text.substr(i + 1), &used);
        i += used + 1;
      }
      for (Rank rank = first; rank <= last && rank < kRanks; ++rank) {
        ranks.push_back(rank);
      }
      i = text.compare(i, 2, ", ") == 0 ? i + 2 : text.npos;
    }
  }
  return ranks;
}

/// One fault in one job, from the processes' start to their end.
class Cell {
 public:
  explicit Cell(const Fault& fault) : fault_(fault), job_(fault), end_(Clock::now() + kCellTime) {
    for (Rank rank = 0; rank < kRanks; ++rank) {
      start(rank, false);
    }
  }
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;
  ~Cell() {
    for (const auto& [pid, rank] : running_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

  const Fault& fault() const { return fault_; }
  int descriptor() const { return job_.reports(); }

  /// Looks at what has happened. @return whether the cell is over.
  bool step() {
    read_reports();
    if (fault_.kind == Fault::Kind::stop && !restarted_ && survivors_failed()) {
      kill(victim_, SIGKILL);  // stopped until now
    }
    if (waiting_ && survivors_failed()) {
      waiting_ = false;
      start(fault_.rank, true);
    }
    for (auto at = running_.begin(); at != running_.end();) {
      int status = 0;
      if (waitpid(at->first, &status, WNOHANG) != at->first) {
        ++at;
        continue;
      }
      const auto [pid, rank] = *at;
      at = running_.erase(at);
      if (pid == victim_ && fault_.kind != Fault::Kind::raise && WIFSIGNALED(status) &&
          WTERMSIG(status) == SIGKILL) {
        restarted_ = true;
        // Where the others wait for it to come, it must not come before they have given up.
        waiting_ = fault_.point == phases::kRendezvous && !survivors_failed();
        if (!waiting_) {
          start(rank, true);
        }
        at = running_.begin();
      } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        wrong("rank " + std::to_string(rank) + " ended with status " + std::to_string(status));
      }
    }
    if (Clock::now() > end_) {
      wrong("it did not end in time");
      return true;
    }
    return running_.empty() && !waiting_;
  }

  /// Everything that was wrong; empty when nothing was.
  std::string conclude() {
    read_reports();
    for (Rank rank = 0; rank < FaultJob::kTrainers; ++rank) {
      if (is_survivor(rank)) {
        check_error(rank);
      }
    }
    for (Rank rank = 0; rank < kRanks; ++rank) {
      if (recovered_.count(rank) == 0) {
        wrong("rank " + std::to_string(rank) + " did not recover");
      } else if (recovered_[rank] != recovered_[0]) {
        wrong("ranks recovered with versions " + recovered_[0] + " and " + recovered_[rank]);
      }
    }
    return wrong_;
  }

 private:
  bool is_survivor(Rank rank) const {
    return rank != fault_.rank || fault_.kind == Fault::Kind::raise;
  }

  bool survivors_failed() const {
    for (Rank rank = 0; rank < FaultJob::kTrainers; ++rank) {
      if (is_survivor(rank) && failed_.count(rank) == 0) {
        return false;
      }
    }
    return true;
  }

  void start(Rank rank, bool again) {
    std::cout.flush();
    const pid_t pid = fork();
    if (pid == 0) {
      job_.run(rank, again);  // does not return
    }
    if (pid < 0) {
      wrong("fork failed");
      return;
    }
    running_.emplace(pid, rank);
    if (rank == fault_.rank && !again) {
      victim_ = pid;
    }
  }

  void wrong(const std::string& what) { wrong_ += (wrong_.empty() ? "" : "; ") + what; }

  void read_reports() {
    std::array<char, 8192> buffer{};
    for (ssize_t size = read(job_.reports(), buffer.data(), buffer.size()); size > 0;
         size = read(job_.reports(), buffer.data(), buffer.size())) {
      pending_.append(buffer.data(), static_cast<std::size_t>(size));
    }
    for (std::size_t end = pending_.find('\n'); end != std::string::npos;
         end = pending_.find('\n')) {
      std::istringstream line(pending_.substr(0, end));
      pending_.erase(0, end + 1);
      Rank rank = 0;
      std::string word;
      std::string rest;
      line >> rank >> word;
      std::getline(line >> std::ws, rest);
      if (word == "failed") {
        failed_.emplace(rank, rest);
      } else if (word == "recovered") {
        recovered_[rank] = rest;
      } else {
        wrong("rank " + std::to_string(rank) + ": " + word + " " + rest);
      }
    }
  }

  /// "<milliseconds> <text>" of a trainer's first failure.
  void check_error(Rank rank) {
    const auto found = failed_.find(rank);
    if (found == failed_.end()) {
      wrong("rank " + std::to_string(rank) + " saw no error");
      return;
    }
    const std::size_t blank = found->second.find(' ');
    const std::string text = found->second.substr(blank + 1);
    if (std::stol(found->second) > FaultJob::kBound.count()) {
      wrong("rank " + std::to_string(rank) + " took " + found->second.substr(0, blank) + " ms");
    }
    if (text.find("phase '") == text.npos) {
      wrong("no phase in: " + text);
    }
    const std::vector<Rank> named = ranks_in(text);
    // A deployment that has lost a worker numbers its own.
    const bool own = text.find("deployment") != text.npos && fault_.rank >= FaultJob::kTrainers;
    const bool found_rank =
        std::count(named.begin(), named.end(), fault_.rank) > 0 ||
        (own && std::count(named.begin(), named.end(), fault_.rank - FaultJob::kTrainers) > 0);
    if (!found_rank) {
      wrong("rank " + std::to_string(rank) +
            " does not name the rank at fault in: " + found->second);
    }
  }

  Fault fault_;
  FaultJob job_;
  Clock::time_point end_;
  std::map<pid_t, Rank> running_;
  pid_t victim_ = 0;
  bool restarted_ = false;
  bool waiting_ = false;  // to be restarted
  std::string pending_;
  std::map<Rank, std::string> failed_;
  std::map<Rank, std::string> recovered_;
  std::string wrong_;
};

/// Where a rank can fail: the seven phases, and three points of a round.
std::vector<Fault> all_faults(const std::string& transport) {
  std::vector<Fault> faults;
  for (const Fault::Kind kind : {Fault::Kind::stop, Fault::Kind::kill, Fault::Kind::raise}) {
    for (Rank rank = 0; rank < kRanks; ++rank) {
      const std::string_view last =
          rank == 0 || rank >= FaultJob::kTrainers ? phases::kFinish : phases::kOutcome;
      for (const std::string_view point :
           {phases::kRendezvous, phases::kSource, phases::kDestination, phases::kDataPlane,
            phases::kRuntime, phases::kCommunicator, phases::kPlan, phases::kRound, phases::kMove,
            last}) {
        faults.push_back({kind, rank, std::string(point), transport});
      }
    }
  }
  return faults;
}

/// All over loopback. Over ucx those in which it takes part and is ended in a way of its own: while
/// it connects, compiles and moves; the rest of its matrix with M2N_TEST_FAULT=ucx.
std::vector<Fault> chosen_faults() {
  std::vector<Fault> faults = all_faults("loopback");
  if (!builtin_registries().transports.contains("ucx")) {
    return faults;
  }
  std::vector<Fault> more = all_faults("ucx");
  const char* const only = std::getenv("M2N_TEST_FAULT");  // NOLINT(concurrency-mt-unsafe)
  if (only == nullptr) {
    std::erase_if(more, [](const Fault& fault) {
      const bool connects = fault.point == phases::kCommunicator || fault.point == phases::kPlan;
      return fault.point != phases::kMove &&
             !(connects && fault.kind == Fault::Kind::kill && fault.rank % 2 == 1);
    });
  }
  faults.insert(faults.end(), more.begin(), more.end());
  if (only != nullptr) {
    std::erase_if(faults, [&](const Fault& fault) {
      return to_string(fault).find(only) == std::string::npos;
    });
  }
  return faults;
}

std::vector<std::string> shared_memory() {
  std::vector<std::string> names;
  if (std::filesystem::exists("/dev/shm")) {
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      if (entry.path().filename().string().find("m2n") != std::string::npos) {
        names.push_back(entry.path().string());
      }
    }
  }
  return names;
}

std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(faults)

BOOST_AUTO_TEST_CASE(no_fault_of_any_rank_at_any_point_hangs_or_mixes) {  // C06, C10
  const std::size_t descriptors = open_descriptors();
  const std::vector<std::string> memory = shared_memory();
  const std::vector<Fault> faults = chosen_faults();
  BOOST_TEST_REQUIRE(!faults.empty());
  std::vector<std::unique_ptr<Cell>> cells;
  std::size_t next = 0;
  while (next < faults.size() || !cells.empty()) {
    while (next < faults.size() && cells.size() < kParallel) {
      cells.push_back(std::make_unique<Cell>(faults[next++]));
    }
    std::vector<pollfd> waits;
    for (const auto& cell : cells) {
      waits.push_back({cell->descriptor(), POLLIN, 0});
    }
    poll(waits.data(), waits.size(), 10);
    std::erase_if(cells, [](const std::unique_ptr<Cell>& cell) {
      if (!cell->step()) {
        return false;
      }
      const std::string wrong = cell->conclude();
      BOOST_TEST(wrong.empty(), to_string(cell->fault()) << ": " << wrong);
      return true;
    });
  }
  BOOST_TEST(open_descriptors() == descriptors);
  BOOST_TEST(shared_memory() == memory, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
