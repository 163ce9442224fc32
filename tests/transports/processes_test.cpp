// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What can happen to a rank that is a process of its own: it is killed, stopped, or plays another
/// round; and what a transport may cost it: memory, descriptors and processor time.

#include <sys/resource.h>
#include <unistd.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/api/builtin.hpp"
#include "tests/transports/subjects.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::Case;
using testing::make;
using testing::Memory;
using testing::none_failed;
using testing::RankEnd;
using testing::require;
using testing::Subject;
using testing::World;

const std::vector<Subject> kSubjects = testing::subjects_between_processes();

constexpr milliseconds kLong{30'000};

/// A rank's transport and session for a Case.
struct Prepared {
  std::unique_ptr<Transport> transport;
  Memory memory;
  std::unique_ptr<Session> session;

  Prepared(const Subject& subject, const Case& c, Group& group)
      : transport(make(subject)), memory(c, group.rank()) {
    transport->connect(group, deadline_in(kLong));
    session = transport->prepare(make_program(c.plan, c.problem, group.rank()), memory.lend(),
                                 deadline_in(kLong));
  }

  void run_round(std::uint64_t version, milliseconds limit) {
    session->start(version, deadline_in(limit));
    session->wait(deadline_in(limit));
  }
};

std::size_t count_entries(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

/// Address space of this process that maps files of this name.
std::uint64_t mapped_bytes(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(name) != std::string::npos) {
      std::size_t dash = 0;
      const std::uint64_t begin = std::stoull(line, &dash, 16);
      bytes += std::stoull(line.substr(dash + 1), nullptr, 16) - begin;
    }
  }
  return bytes;
}

double processor_seconds() {
  struct rusage used = {};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// Ranks 0 and 2 must have said, with one of the codes, that rank 1 is at fault.
void check_survivors(const std::vector<RankEnd>& ends) {
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    BOOST_TEST_CONTEXT("rank " << rank << ": " << ends[rank].failure) {
      BOOST_TEST_REQUIRE(ends[rank].code.has_value());
      BOOST_TEST((*ends[rank].code == Errc::timed_out || *ends[rank].code == Errc::peer_lost));
      BOOST_TEST(ends[rank].failure.find('1') != std::string::npos);
    }
  }
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(processes)

BOOST_DATA_TEST_CASE(a_rank_killed_before_its_round_is_named_long_before_the_deadline,
                     bdata::make(kSubjects), subject) {
  const Case c = Case::make(64);
  const auto start = std::chrono::steady_clock::now();
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared rank(subject, c, group);
    rank.run_round(1, kLong);
    if (group.rank() == 1) {
      std::raise(SIGKILL);
    }
    rank.run_round(2, kLong);
  });
  BOOST_TEST((std::chrono::steady_clock::now() - start < kLong));
  BOOST_TEST(ends[1].signal == SIGKILL);
  check_survivors(ends);
  BOOST_TEST((*ends[0].code == Errc::peer_lost));
}

BOOST_DATA_TEST_CASE(a_rank_killed_between_start_and_wait_is_named, bdata::make(kSubjects),
                     subject) {
  const Case c = Case::make(2'000'000);  // more than fits in any staging
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared rank(subject, c, group);
    if (group.rank() == 1) {
      rank.session->start(1, deadline_in(kLong));
      std::raise(SIGKILL);
    }
    rank.run_round(1, kLong);
  });
  BOOST_TEST(ends[1].signal == SIGKILL);
  check_survivors(ends);
}

BOOST_DATA_TEST_CASE(a_rank_killed_in_the_midst_of_its_rounds_is_named, bdata::make(kSubjects),
                     subject) {
  const Case c = Case::make(1'000'000);
  for (const int after_us : {3'000, 20'000, 41'000}) {
    const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
      Prepared rank(subject, c, group);
      group.barrier("prepared", deadline_in(kLong));
      if (group.rank() == 1) {
        std::signal(SIGALRM, SIG_DFL);
        const itimerval once = {{0, 0}, {0, after_us}};
        ::setitimer(ITIMER_REAL, &once, nullptr);
      }
      for (std::uint64_t version = 1;; ++version) {
        rank.run_round(version, kLong);
      }
    });
    BOOST_TEST(ends[1].signal == SIGALRM);
    check_survivors(ends);
  }
}

BOOST_DATA_TEST_CASE(a_stopped_rank_is_named_by_the_deadline, bdata::make(kSubjects), subject) {
  const Case c = Case::make(1'000);
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared rank(subject, c, group);
    const auto pids =
        group.all_gather("process ids", std::to_string(::getpid()), deadline_in(kLong));
    rank.run_round(1, kLong);
    if (group.rank() == 1) {
      std::raise(SIGSTOP);
    }
    try {
      rank.run_round(2, milliseconds(1'000));
    } catch (const Error&) {
      if (group.rank() == 0) {
        std::this_thread::sleep_for(milliseconds(500));  // the other one comes to its end, too
        ::kill(std::stoi(pids[1]), SIGKILL);
      }
      throw;
    }
  });
  BOOST_TEST(ends[1].signal == SIGKILL);
  check_survivors(ends);
}

BOOST_DATA_TEST_CASE(ranks_in_different_rounds_find_out, bdata::make(kSubjects), subject) {
  const Case c = Case::make(64);
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared rank(subject, c, group);
    rank.run_round(group.rank() == 1 ? 8 : 7, kLong);
  });
  std::size_t told = 0;
  for (const RankEnd& end : ends) {
    BOOST_TEST(!end.failure.empty());
    told += end.failure.find("version 8") != std::string::npos ? 1 : 0;
  }
  BOOST_TEST(told > 0u);
}

BOOST_DATA_TEST_CASE(ranks_with_different_plans_are_refused_by_all, bdata::make(kSubjects),
                     subject) {
  const Case one = Case::make(64);
  const Case other = Case::make(65);
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared(subject, group.rank() == 2 ? other : one, group);
  });
  for (const RankEnd& end : ends) {
    BOOST_TEST_REQUIRE(end.code.has_value(), end.failure);
    BOOST_TEST((*end.code == Errc::bad_plan), end.failure);
  }
}

BOOST_DATA_TEST_CASE(a_world_can_be_made_again_after_a_failure, bdata::make(kSubjects), subject) {
  const Case c = Case::make(1'000);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    {
      Prepared failed(subject, c, group);
      failed.session->start(1, deadline_in(kLong));
      if (group.rank() == 2) {
        failed.session->abort();
      }
      try {
        failed.session->wait(deadline_in(kLong));
        require(false, "an aborted round was complete");
      } catch (const TransportError&) {
      }
    }
    Prepared again(subject, c, group);
    again.memory.fill(group.rank() == 0 ? 0 : 500, 2);
    again.run_round(2, kLong);
    require(again.memory.holds(2), "bytes of the second world");
    group.barrier("checked", deadline_in(kLong));
  }));
}

BOOST_DATA_TEST_CASE(worlds_leave_no_descriptor_and_no_shared_memory_behind, bdata::make(kSubjects),
                     subject) {
  const Case c = Case::make(1'000);
  const std::size_t shared_before = count_entries("/dev/shm");
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    std::size_t descriptors = 0;
    for (std::uint64_t i = 0; i < 6; ++i) {
      {
        Prepared(subject, c, group).run_round(1, kLong);
      }
      group.barrier("closed", deadline_in(kLong));
      const std::size_t now = count_entries("/proc/self/fd");
      require(i < 2 || now <= descriptors, "descriptors grow to " + std::to_string(now));
      descriptors = now;
    }
  }));
  BOOST_TEST(count_entries("/dev/shm") <= shared_before);
}

BOOST_DATA_TEST_CASE(a_waiting_rank_leaves_the_processor_to_others, bdata::make(kSubjects),
                     subject) {
  const Case c = Case::make(1'000);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    Prepared rank(subject, c, group);
    rank.run_round(1, kLong);
    group.barrier("warm", deadline_in(kLong));
    const double before = processor_seconds();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(1'500));
    }
    rank.run_round(2, kLong);
    const double used = processor_seconds() - before;
    require(used < 0.5, "waiting took " + std::to_string(used) + " s of processor time");
  }));
}

/// Each of many ranks sends to the next one alone.
BOOST_AUTO_TEST_CASE(pairs_without_traffic_cost_no_memory) {
  constexpr Rank kRanks = 300;
  constexpr Index kElements = 16 * kRanks;
  std::vector<Rank> next;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    next.push_back((rank + 1) % kRanks);
  }
  const auto source = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::i64, Mesh({kRanks}, 0), {Placement::shard(0)}));
  const auto destination = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::i64, Mesh({kRanks}, next), {Placement::shard(0)}));
  Case c{Problem::make({{"w", {kElements}, {source, {"w"}}, {destination, {"w"}}, false}}), {}};
  c.plan = builtin_registries()
               .planners.create("direct", {})
               ->plan(c.problem, Topology::single_island(kRanks));
  none_failed(testing::run_ranks(World::threads_apart, kRanks, [&](Group& group) {
    Prepared rank({"loopback", World::threads_apart}, c, group);
    if (group.rank() == 0) {
      // A ring of 1 MiB, mapped by its two ends; the front pages and the world, a rank.
      const std::uint64_t mapped = mapped_bytes("memfd:m2n");
      require(mapped > kRanks * (2 << 20) && mapped < kRanks * (3 << 20),
              "mapped " + std::to_string(mapped) + " bytes");
    }
    group.barrier("measured", deadline_in(kLong));
    const Index begin = group.rank() * (kElements / kRanks);
    rank.memory.fill(begin, 1);
    rank.run_round(1, kLong);
    const std::int64_t from = (group.rank() + kRanks - 1) % kRanks * (kElements / kRanks);
    for (std::size_t i = 0; i < rank.memory.destination.size(); ++i) {
      require(rank.memory.destination[i] == 1'000'000 + from + static_cast<std::int64_t>(i),
              "an element is in another's place");
    }
    group.barrier("checked", deadline_in(kLong));
  }));
}

/// A group in which rank 2 runs on another machine.
class TwoMachines final : public Group {
 public:
  explicit TwoMachines(Group& group) : group_(group) {}
  Rank rank() const noexcept override { return group_.rank(); }
  Rank size() const noexcept override { return group_.size(); }
  bool in_process() const noexcept override { return false; }
  std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                      Deadline deadline) override {
    const std::string mine = group_.rank() == 2 ? "another machine" : std::string(value);
    return group_.all_gather(phase, mine, deadline);
  }
  void barrier(std::string_view phase, Deadline deadline) override {
    group_.barrier(phase, deadline);
  }

 private:
  Group& group_;
};

BOOST_AUTO_TEST_CASE(loopback_names_the_ranks_on_other_machines_to_all) {
  const auto ends = testing::run_ranks(World::threads_apart, 3, [](Group& group) {
    TwoMachines apart(group);
    make({"loopback", World::processes})->connect(apart, deadline_in(kLong));
  });
  for (const RankEnd& end : ends) {
    BOOST_TEST_REQUIRE(end.code.has_value(), end.failure);
    BOOST_TEST((*end.code == Errc::unavailable));
    BOOST_TEST(end.failure.find("elsewhere than rank 0: 2;") != std::string::npos, end.failure);
  }
}

BOOST_AUTO_TEST_CASE(loopback_refuses_device_memory) {
  const Case c = Case::make(64);
  for (const World world : {World::threads, World::threads_apart}) {
    const auto ends = testing::run_ranks(world, 3, [&](Group& group) {
      const auto transport = make({"loopback", world});
      transport->connect(group, deadline_in(kLong));
      Memory memory(c, group.rank());
      Buffers buffers = memory.lend();
      for (LocalBuffer& buffer : buffers.source) {
        buffer.space = MemorySpace::device;
      }
      transport->prepare(make_program(c.plan, c.problem, group.rank()), buffers,
                         deadline_in(kLong));
    });
    for (const std::size_t rank : {std::size_t{0}, std::size_t{1}}) {
      BOOST_TEST(ends[rank].failure.find("device 0") != std::string::npos, ends[rank].failure);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
