// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Worlds of processes, and what survivors learn when one of them is killed or stopped.

#include <signal.h>
#include <unistd.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>
#include <set>

#include "tests/core/rendezvous/child_processes.hpp"
#include "tests/core/rendezvous/store_world.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::ChildProcesses;
using testing::kToken;
using testing::long_deadline;

constexpr Rank kRanks = 5;
/// For waits that end by it. Long enough for whoever is not stopped to get there.
constexpr milliseconds kPatience{2'000};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What a phase does with a group, and what each rank waits for in it.
struct Phase {
  const char* name;
  void (*run)(WorldGroup& group, Deadline deadline);
  /// The rank all others wait for; any rank when negative.
  Rank awaited;
};
std::ostream& operator<<(std::ostream& os, const Phase& phase) { return os << phase.name; }

const std::vector<Phase> kPhases = {
    {"barrier", [](WorldGroup& group, Deadline deadline) { group.barrier("barrier", deadline); },
     -1},
    {"all-gather",
     [](WorldGroup& group, Deadline deadline) { group.all_gather("all-gather", "x", deadline); },
     -1},
    {"agreement",
     [](WorldGroup& group, Deadline deadline) {
       require_agreement(group, "agreement", Statement::value("x"), deadline);
     },
     -1},
    {"broadcast",
     [](WorldGroup& group, Deadline deadline) { group.broadcast("broadcast", 3, "x", deadline); },
     3},
    {"mail",
     [](WorldGroup& group, Deadline deadline) {
       for (Rank to = 0; group.rank() == 3 && to < group.size(); ++to) {
         group.send("mail", to, "x", deadline);
       }
       group.receive("mail", 3, deadline);
     },
     3},
};

/// A job whose ranks are processes; rank 0's has the store. The port stays reserved here.
class Job {
 public:
  std::string address() const { return socket_.address(); }

  /// @param victim  Reports "ready" once it has joined, and sleeps instead of going on.
  void start(std::uint64_t epoch, const Phase& phase, Rank victim, milliseconds patience) {
    const std::uint16_t port = socket_.port();
    for (Rank rank = 0; rank < kRanks; ++rank) {
      ranks_.start(rank, [&](const ChildProcesses::Report& report) {
        std::optional<StoreServer> store;
        if (rank == 0) {
          store.emplace(socket_.share(), StoreOptions{.token = kToken, .epoch = epoch});
        }
        ::close(socket_.release());
        WorldOptions options;
        options.port = port;
        options.token = kToken;
        options.epoch = epoch;
        options.rank = rank;
        options.size = kRanks;
        const auto group = join_world(options, long_deadline());
        group->barrier("begin", long_deadline());
        if (group->in_process()) {
          throw std::runtime_error("takes processes for threads");
        }
        report("ready");
        if (rank == victim) {
          for (;;) {
            ::pause();
          }
        }
        phase.run(*group, deadline_in(patience));
        group->barrier("end", deadline_in(patience));
        group->leave("");
        if (store.has_value()) {
          store->drain(long_deadline());
        }
      });
    }
    for (Rank rank = 0; rank < kRanks; ++rank) {
      BOOST_TEST(ranks_.line(rank) == "ready");
    }
  }

  /// What each rank but @p victim said last; all the same. When rank 0's store has gone, each rank
  /// knows its own phase only.
  std::string outcome(Rank victim) {
    std::set<std::string> texts;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      if (rank != victim) {
        const std::string text = ranks_.line(rank);
        texts.insert(victim == 0 ? text.substr(text.find("ranks")) : text);
        BOOST_TEST(text.starts_with(victim < 0 ? "done" : "threw phase '"), text);
        BOOST_TEST(ranks_.wait(rank) == 0);
      }
    }
    BOOST_TEST(texts.size() == 1U);
    return *texts.begin();
  }

  ChildProcesses& ranks() { return ranks_; }

 private:
  ListenSocket socket_ = ListenSocket::reserve("127.0.0.1", 0);
  ChildProcesses ranks_;
};

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(processes)

BOOST_DATA_TEST_CASE(survivors_name_a_killed_rank_and_a_new_epoch_works, bdata::make(kPhases),
                     phase) {
  std::uint64_t epoch = 1;
  Job job;
  for (const Rank victim : {0, 2, 3}) {
    if (phase.awaited >= 0 && phase.awaited != victim && victim != 0) {
      continue;  // Nobody misses it before the end.
    }
    job.start(epoch++, phase, victim, std::chrono::minutes(10));
    job.ranks().send_signal(victim, SIGKILL);
    job.ranks().wait(victim);
    const std::string text = job.outcome(victim);
    // The process is the test's own: nobody waited for the deadline of ten minutes.
    BOOST_TEST(contains(text, "ranks that have left: " + std::to_string(victim) + " ("), text);
  }
  job.start(epoch, phase, -1, std::chrono::minutes(10));
  BOOST_TEST(job.outcome(-1) == "done");
}

/// One that all wait in, and those that wait for one rank; each takes its deadline's time.
const std::vector<Phase> kSlowPhases(kPhases.begin() + 2, kPhases.end());

BOOST_DATA_TEST_CASE(survivors_name_a_stopped_rank_at_the_deadline, bdata::make(kSlowPhases),
                     phase) {
  Job job;
  const Rank victim = phase.awaited >= 0 ? phase.awaited : 2;
  job.start(1, phase, victim, kPatience);
  job.ranks().send_signal(victim, SIGSTOP);
  BOOST_TEST(job.outcome(victim) ==
             std::string("threw phase '") + phase.name +
                 "': the deadline passed; ranks missing: " + std::to_string(victim));
}

BOOST_AUTO_TEST_CASE(survivors_name_rank_0_when_its_process_with_the_store_is_stopped) {
  Job job;
  job.start(1, kPhases[0], 0, kPatience);
  job.ranks().send_signal(0, SIGSTOP);
  const std::string text = job.outcome(0);
  BOOST_TEST(text.starts_with("ranks missing: 0 ("), text);
}

BOOST_AUTO_TEST_CASE(a_rank_killed_while_others_are_still_joining_is_named_to_all) {
  ChildProcesses ranks;
  const ListenSocket socket = ListenSocket::reserve("127.0.0.1", 0);
  const auto join = [&](Rank rank) {
    WorldOptions options;
    options.port = socket.port();
    options.token = kToken;
    options.rank = rank;
    options.size = 3;
    join_world(options, long_deadline());
  };
  ranks.start(0, [&](const ChildProcesses::Report&) {
    const StoreServer store(socket.share(), {.token = kToken});
    join(0);
  });
  ranks.start(1, [&](const ChildProcesses::Report& report) {
    report("joining");
    join(1);
  });
  BOOST_TEST(ranks.line(1) == "joining");
  ::usleep(200'000);  // It is most likely waiting by now; if not, rank 0 waits for its deadline.
  ranks.send_signal(1, SIGKILL);
  ranks.wait(1);
  const std::string text = ranks.line(0);
  BOOST_TEST(text.starts_with("threw phase 'rendezvous': "), text);
  BOOST_TEST(contains(text, "1"), text);
}

BOOST_AUTO_TEST_CASE(a_watchdog_learns_of_a_death_while_nobody_waits) {
  ChildProcesses ranks;
  const ListenSocket socket = ListenSocket::reserve("127.0.0.1", 0);
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks.start(rank, [&](const ChildProcesses::Report& report) {
      std::optional<StoreServer> store;
      if (rank == 0) {
        store.emplace(socket.share(), StoreOptions{.token = kToken});
      }
      WorldOptions options;
      options.port = socket.port();
      options.token = kToken;
      options.rank = rank;
      options.size = 2;
      const auto group = join_world(options, long_deadline());
      group->barrier("work", long_deadline());
      if (!group->failure().empty()) {
        throw std::runtime_error("failed too early");
      }
      report("working");
      while (group->failure().empty()) {
        ::usleep(1000);
      }
      throw std::runtime_error(group->failure());
    });
  }
  BOOST_TEST(ranks.line(0) == "working");
  BOOST_TEST(ranks.line(1) == "working");
  ranks.send_signal(1, SIGKILL);
  const std::string text = ranks.line(0);
  BOOST_TEST(text.starts_with("threw phase 'work': ranks that have left: 1 ("), text);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
