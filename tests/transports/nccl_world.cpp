// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transports/nccl_world.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/error.hpp"

extern char** environ;

namespace m2n::testing {
namespace {

constexpr std::size_t kSlotBytes = 4 << 20;

/// One rank's part of the shared file.
struct Slot {
  std::atomic<std::uint64_t> written;  ///< Values so far.
  std::atomic<std::uint64_t> read;     ///< Rounds of which this rank has read every value.
  std::uint64_t bytes;
  char error[4096];
  char value[kSlotBytes];
};

Slot* map_slots(const std::string& file, Rank count) {
  const int descriptor = open(file.c_str(), O_RDWR);
  expects(descriptor >= 0, "the shared file of the ranks");
  void* at = mmap(nullptr, 2 * sizeof(Slot) * static_cast<std::size_t>(count),
                  PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  expects(at != MAP_FAILED, "a mapping of the shared file");
  return static_cast<Slot*>(at);
}

class FileGroup final : public Group {
 public:
  FileGroup(Slot* slots, Rank rank, Rank size) : slots_(slots), rank_(rank), size_(size) {}

  Rank rank() const noexcept override { return rank_; }
  Rank size() const noexcept override { return size_; }
  bool in_process() const noexcept override { return false; }

  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    expects(value.size() <= kSlotBytes, "a value of at most 4 MiB");
    wait_all(phase, deadline, [&](const Slot& s) { return s.read >= round_; });
    ++round_;
    Slot& mine = slots_[rank_];
    std::memcpy(mine.value, value.data(), value.size());
    mine.bytes = value.size();
    mine.written = round_;
    wait_all(phase, deadline, [&](const Slot& s) { return s.written >= round_; });
    std::vector<std::string> all;
    for (Rank r = 0; r < size_; ++r) {
      all.emplace_back(slots_[r].value, slots_[r].bytes);
    }
    mine.read = round_;
    return all;
  }

  void barrier(std::string_view phase, Deadline deadline) override {
    all_gather(phase, "", deadline);
  }

 private:
  template <class Ready>
  void wait_all(std::string_view phase, Deadline deadline, const Ready& ready) {
    for (Rank r = 0; r < size_; ++r) {
      while (!ready(slots_[r])) {
        if (std::chrono::steady_clock::now() > deadline) {
          throw Error(Errc::timed_out, "the deadline passed in " + std::string(phase) +
                                           "; ranks missing: " + std::to_string(r));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }

  Slot* slots_;
  Rank rank_;
  Rank size_;
  std::uint64_t round_ = 0;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr ? value : "";
}

}  // namespace

std::map<std::string, RankBody>& rank_bodies() {
  static std::map<std::string, RankBody> bodies;
  return bodies;
}

void run_if_rank() {
  const std::string body = variable("M2N_RANK_BODY");
  if (body.empty()) {
    return;
  }
  const Rank rank = std::stoi(variable("M2N_RANK"));
  const Rank count = std::stoi(variable("M2N_RANKS"));
  Slot* slots = map_slots(variable("M2N_RANK_FILE"), count);
  int status = 0;
  try {
    FileGroup group(slots, rank, count);
    rank_bodies().at(body)(group, variable("M2N_RANK_ARGUMENT"));
  } catch (const std::exception& error) {
    std::snprintf(slots[rank].error, sizeof slots[rank].error, "%s", error.what());
    status = 1;
  }
  std::fflush(nullptr);
  std::_Exit(status);
}

std::unique_ptr<Group> second_group(Rank rank, Rank size) {
  const Rank count = std::stoi(variable("M2N_RANKS"));
  return std::make_unique<FileGroup>(map_slots(variable("M2N_RANK_FILE"), count) + count, rank,
                                     size);
}

RankProcesses start_ranks(Rank count, const std::string& body, const std::string& argument,
                          bool apart) {
  RankProcesses ranks;
  char name[] = "/dev/shm/m2n-ranks-XXXXXX";
  const int descriptor = mkstemp(name);
  expects(descriptor >= 0, "room in /dev/shm");
  ranks.file = name;
  const auto bytes = static_cast<off_t>(2 * sizeof(Slot) * static_cast<std::size_t>(count));
  expects(ftruncate(descriptor, bytes) == 0, "room in /dev/shm");
  close(descriptor);
  for (Rank rank = 0; rank < count; ++rank) {
    std::vector<std::string> words;
    for (char** at = environ; *at != nullptr; ++at) {
      words.emplace_back(*at);
    }
    words.push_back("M2N_RANK_BODY=" + body);
    words.push_back("M2N_RANK_ARGUMENT=" + argument);
    words.push_back("M2N_RANK=" + std::to_string(rank));
    words.push_back("M2N_RANKS=" + std::to_string(count));
    words.push_back("M2N_RANK_FILE=" + ranks.file);
    if (apart) {
      words.push_back("NCCL_HOSTID=rank" + std::to_string(rank));
    }
    std::vector<char*> environment;
    for (std::string& word : words) {
      environment.push_back(word.data());
    }
    environment.push_back(nullptr);
    char self[] = "/proc/self/exe";
    char* arguments[] = {self, nullptr};
    pid_t process = 0;
    expects(posix_spawn(&process, self, nullptr, nullptr, arguments, environment.data()) == 0,
            "a process a rank");
    ranks.processes.push_back(process);
  }
  return ranks;
}

std::vector<RankEnd> wait_ranks(RankProcesses& ranks, std::chrono::seconds patience) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<RankEnd> ends(ranks.processes.size());
  std::size_t left = ends.size();
  bool killed = false;
  while (left > 0) {
    std::size_t stopped = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      RankEnd& end = ends[i];
      int status = 0;
      if (!end.exited && waitpid(ranks.processes[i], &status, WNOHANG | WUNTRACED) != 0) {
        end.stopped = WIFSTOPPED(status);
        end.exited = !end.stopped;
        left -= end.exited ? 1 : 0;
        end.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        end.seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      }
      stopped += end.stopped ? 1 : 0;
    }
    if (!killed && left > 0 &&
        (stopped == left || std::chrono::steady_clock::now() - begin > patience)) {
      killed = true;
      for (std::size_t i = 0; i < ends.size(); ++i) {
        if (!ends[i].exited) {
          kill(ranks.processes[i], SIGKILL);
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  Slot* slots = map_slots(ranks.file, static_cast<Rank>(ends.size()));
  for (std::size_t i = 0; i < ends.size(); ++i) {
    ends[i].error = slots[i].error;
  }
  munmap(slots, 2 * sizeof(Slot) * ends.size());
  unlink(ranks.file.c_str());
  return ends;
}

}  // namespace m2n::testing
