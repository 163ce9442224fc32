// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A rank of the NCCL transport that is killed, stopped or leaves: the others are out by their
/// deadline, say who it was, and in the same process go on without it.

#include <signal.h>
#include <unistd.h>

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>
#include <thread>

#include "core/error.hpp"
#include "tests/transports/nccl_gpu.hpp"

namespace m2n::nccl {
namespace {

namespace bdata = boost::unit_test::data;
using Clock = std::chrono::steady_clock;

constexpr Rank kRanks = 3;
constexpr std::chrono::seconds kRoundLimit{3};
/// For the library to give up its communicator, after the deadline.
constexpr std::chrono::seconds kPatience{9};

struct Fault {
  const char* path;
  const char* how;  ///< "kill", "stop", or "leave": the session is destroyed.
  const char*
      when;  ///< "prepared": before any round; "between" two rounds; "middle" of the second.
  Rank who;

  std::string text() const {
    return std::string(path) + " " + how + " " + when + " " + std::to_string(who);
  }
};
std::ostream& operator<<(std::ostream& os, const Fault& fault) { return os << fault.text(); }

/// The ranks after "ranks missing: " or "ranks not done: ", without what is said of them.
std::vector<std::string> named(const std::string& error) {
  std::vector<std::string> names;
  std::size_t at = error.rfind("ranks ");
  at = at == std::string::npos ? at : error.find(": ", at);
  while (at != std::string::npos) {
    at = error.find_first_of("0123456789", at);
    if (at == std::string::npos) {
      break;
    }
    const std::size_t end = std::min(error.find_first_of(" ,", at), error.size());
    names.push_back(error.substr(at, end - at));
    at = error.find(',', end);
  }
  return names;
}

void fall(const std::string& how) {
  if (how == "kill") {
    kill(getpid(), SIGKILL);
  } else if (how == "stop") {
    kill(getpid(), SIGSTOP);
  }
}

/// Rounds in which rank @p who falls; the others must be out in time.
void rounds_with_a_fault(Group& group, const std::string& argument, const Simple& c) {
  const std::string how = word(argument, 1);
  const std::string when = word(argument, 2);
  const Rank who = std::stoi(word(argument, 3));
  const bool falls = group.rank() == who;
  const auto transport = make({{"path", word(argument, 0)}});
  transport->connect(group, soon());
  OnDevice memory(numbers(c.elements, 1));
  auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                    Simple::buffers(group.rank(), memory.buffer()), soon());
  std::uint64_t round = 1;
  if (when != "prepared") {
    session->start(round, soon());
    session->wait(soon());
    group.barrier("first round", soon());
    ++round;
  }
  if (falls) {
    if (when == "middle") {
      session->start(round, soon());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fall(how);
    return;  // and so the session goes
  }
  const auto begin = Clock::now();
  std::string error;
  try {
    const Deadline deadline = deadline_in(kRoundLimit);
    session->start(round, deadline);
    session->wait(deadline);
  } catch (const TransportError& thrown) {
    error = thrown.what();
    require(thrown.code() == Errc::timed_out || thrown.code() == Errc::peer_lost, error);
  }
  session.reset();
  const std::chrono::duration<double> took = Clock::now() - begin;
  require(took < kRoundLimit + kPatience, "out after " + std::to_string(took.count()) + " s");
  // Work that was queued before its rank fell may still have ended, so a round may be complete: but
  // not one that the rank never began, for those that it sends to or receives from.
  const bool direct = group.rank() == 0 || who == 0;
  if (error.empty()) {
    require(!direct || when == "middle", "the round cannot be complete");
  } else if (direct) {
    const std::vector<std::string> names = named(error);
    require(names == std::vector{std::to_string(who)},
            "expected rank " + std::to_string(who) + " alone to be named: " + error);
  }
}

void fault_body(Group& group, const std::string& argument) {
  select_device(group.rank());
  const bool wire = word(argument, 0) == "wire";
  // Enough to be under way for a while: 10 ms over NVLink, 50 over sockets.
  const Simple c = Simple::make(Index{1} << (wire ? 24 : 28), kRanks);
  rounds_with_a_fault(group, argument, c);
  const Rank who = std::stoi(word(argument, 3));
  if (group.rank() == who) {
    return;
  }
  const auto rest = testing::second_group(group.rank() - (group.rank() > who ? 1 : 0), 2);
  simple_rounds(*rest, Simple::make(100'000, 2), {{"path", word(argument, 0)}}, 2);
}
const RankBodyEntry kFault("fault", fault_body);

const std::vector<Fault> kFaults = {
    {"ipc", "kill", "prepared", 1},  {"ipc", "kill", "between", 1},
    {"ipc", "kill", "middle", 0},    {"ipc", "kill", "middle", 1},
    {"ipc", "stop", "between", 1},   {"ipc", "stop", "middle", 0},
    {"ipc", "leave", "prepared", 1}, {"ipc", "leave", "middle", 0},
    {"wire", "kill", "prepared", 1}, {"wire", "kill", "middle", 1},
    {"wire", "kill", "middle", 0},   {"wire", "stop", "between", 1},
    {"wire", "stop", "middle", 0},   {"wire", "leave", "between", 1},
};

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(nccl_faults_gpu)

// C13
BOOST_DATA_TEST_CASE(a_rank_that_falls_is_named_and_the_others_go_on_without_it,
                     bdata::make(kFaults), fault) {
  auto ranks = testing::start_ranks(kRanks, "fault", fault.text(), true);
  const auto ends = testing::wait_ranks(ranks, std::chrono::seconds(30));
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const bool falls = static_cast<Rank>(i) == fault.who;
    const bool survives = !falls || std::string(fault.how) == "leave";
    BOOST_TEST(ends[i].status == (survives ? 0 : -SIGKILL),
               "rank " << i << " ended with " << ends[i].status << " after " << ends[i].seconds
                       << " s: " << ends[i].error);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_throws_in_a_round_lets_the_others_out_at_once) {
  const Simple c = Simple::make(1 << 20, 2);
  const auto begin = Clock::now();
  const auto failures = run_threads(2, [&](Group& group) {
    select_device(group.rank());
    OnDevice memory(numbers(c.elements, 1));
    const auto transport = make({});
    transport->connect(group, soon());
    const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                            Simple::buffers(group.rank(), memory.buffer()), soon());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      session->abort();
      throw std::runtime_error("no memory left");
    }
    session->start(1, soon());
    session->wait(soon());
  });
  BOOST_TEST(named(failures[0]) == std::vector<std::string>{"1"}, failures[0]);
  BOOST_TEST((Clock::now() - begin < std::chrono::seconds(10)));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n::nccl
