// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// ucx between two network namespaces that a veth pair joins, so that TCP is really used: what
/// arrives, and what a cut link says. Exits 77 where namespaces cannot be made.

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>

#include "core/api/builtin.hpp"
#include "tests/support/run_program.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/transports/subjects.hpp"

namespace m2n {
namespace {

using std::chrono::milliseconds;
using testing::none_failed;
using testing::require;
using testing::World;

constexpr milliseconds kLong{30'000};

void ip(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"/usr/bin/env", "ip"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const testing::Outcome outcome = testing::run_program(words, "/");
  require(outcome.status == 0, "ip " + arguments.at(0) + ": " + outcome.err);
}

/// Puts this rank's process into a network namespace of its own, joined to the other rank's by a
/// link "m2n". Namespaces and link are gone with the processes.
void isolate(Group& group) {
  // UCX finds network devices in /sys, which shows those of the namespace that mounted it.
  require(::unshare(CLONE_NEWNET | CLONE_NEWNS) == 0 &&
              ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
              ::mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0,
          std::string("cannot make namespaces: ") + std::strerror(errno));
  const auto processes =
      group.all_gather("namespaces", std::to_string(::getpid()), deadline_in(kLong));
  if (group.rank() == 0) {
    ip({"link", "add", "m2n", "type", "veth", "peer", "name", "m2n", "netns", processes[1]});
  }
  group.barrier("link", deadline_in(kLong));
  ip({"addr", "add", "10.77.0." + std::to_string(group.rank() + 1) + "/24", "dev", "m2n"});
  ip({"link", "set", "m2n", "up"});
  const Deadline limit = deadline_in(kLong);
  while (testing::read_file("/sys/class/net/m2n/operstate") != "up\n") {  // when both ends are
    require(std::chrono::steady_clock::now() < limit, "the link does not come up");
    std::this_thread::sleep_for(milliseconds(10));
  }
  group.barrier("up", deadline_in(kLong));
}

/// Leaves the program with 77, visibly, where this cannot be tested.
struct NeedsNamespaces {
  NeedsNamespaces() {
    std::string why = "ucx is not built in";
    if (builtin_registries().transports.contains("ucx")) {
      const auto ends = testing::run_ranks(World::processes, 2, isolate);
      why = ends[0].failure + ends[1].failure;
    }
    if (!why.empty()) {
      std::cout << "skipped: needs network namespaces: " << why << std::endl;
      std::_Exit(77);
    }
  }
};

/// Tensors from rank 0 to 1, and one back.
struct Case {
  Problem problem;
  Plan plan;

  static Case make(Index elements) {
    const Shape shape{64, elements / 64};
    const auto on = [&](Rank rank, Strides strides) {
      return std::make_shared<const Layout>(Layout::explicit_pieces(
          shape, DType::i64, {0, 1}, {{rank, {{{0, 0}, shape}, {0, 0, strides}}}}));
    };
    const Strides rows{shape[1], 1};
    const Strides columns{1, 64};
    Case c{Problem::make({{"rows", shape, {on(0, rows), {"a"}}, {on(1, rows), {"a"}}, false},
                          {"turned", shape, {on(0, rows), {"b"}}, {on(1, columns), {"b"}}, false},
                          {"back", shape, {on(1, rows), {"c"}}, {on(0, rows), {"c"}}, false}}),
           {}};
    c.plan = builtin_registries()
                 .planners.create("direct", {})
                 ->plan(c.problem, Topology::single_island(2));
    return c;
  }
};

/// A rank's transport, memory and session, across the link.
class Side {
 public:
  Side(const Case& c, Group& group)
      : transport_(testing::make({"ucx", World::processes, {{"tls", "tcp"}}})) {
    Buffers buffers;
    for (const Role role : {Role::source, Role::destination}) {
      auto& side = role == Role::source ? buffers.source : buffers.destination;
      auto& memory = role == Role::source ? source_ : destination_;
      for (const std::uint64_t bytes : c.problem.buffer_bytes(role, group.rank())) {
        memory.emplace_back(bytes / 8, -1);
        side.push_back(
            {reinterpret_cast<std::byte*>(memory.back().data()), bytes, MemorySpace::host, 0});
      }
    }
    transport_->connect(group, deadline_in(kLong));
    session_ = transport_->prepare(make_program(c.plan, c.problem, group.rank()), buffers,
                                   deadline_in(kLong));
  }

  RoundReport run_round(std::int64_t version, milliseconds limit) {
    for (std::size_t tensor = 0; tensor < source_.size(); ++tensor) {
      for (std::size_t i = 0; i < source_[tensor].size(); ++i) {
        source_[tensor][i] = value(tensor, i, version);
      }
    }
    session_->start(static_cast<std::uint64_t>(version), deadline_in(limit));
    return session_->wait(deadline_in(limit));
  }

  void check(std::int64_t version) const {
    for (std::size_t tensor = 0; tensor < destination_.size(); ++tensor) {
      const auto& got = destination_[tensor];
      const std::size_t columns = got.size() / 64;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::size_t at = tensor == 1 ? i % 64 * columns + i / 64 : i;
        if (got[i] != value(tensor, at, version)) {
          require(false, "tensor " + std::to_string(tensor) + " differs at " + std::to_string(i));
        }
      }
    }
  }

 private:
  static std::int64_t value(std::size_t tensor, std::size_t at, std::int64_t version) {
    return static_cast<std::int64_t>(tensor * 100'000'000 + at) + version * 1'000'000'000;
  }

  std::vector<std::vector<std::int64_t>> source_;
  std::vector<std::vector<std::int64_t>> destination_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Session> session_;
};

BOOST_TEST_GLOBAL_FIXTURE(NeedsNamespaces);

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(ucx_network)

BOOST_AUTO_TEST_CASE(rounds_cross_a_link_between_namespaces) {
  const Case c = Case::make(64 * 10'000);
  none_failed(testing::run_ranks(World::processes, 2, [&](Group& group) {
    isolate(group);
    Side side(c, group);
    for (std::int64_t version = 1; version <= 3; ++version) {
      const RoundReport report = side.run_round(version, kLong);
      side.check(version);
      require(report.peers.at(0).path.starts_with("wire (tcp"), report.peers[0].path);
    }
  }));
}

void check_cut(bool in_a_round) {
  const Case c = Case::make(64 * 30'000);
  constexpr milliseconds kLimit{2'000};
  const auto ends = testing::run_ranks(World::processes, 2, [&](Group& group) {
    isolate(group);
    Side side(c, group);
    side.run_round(1, kLong);
    side.check(1);
    group.barrier("before the cut", deadline_in(kLong));
    std::thread cutter;
    if (group.rank() == 1) {
      if (in_a_round) {
        cutter = std::thread([] {
          std::this_thread::sleep_for(milliseconds(50));
          ip({"link", "set", "m2n", "down"});
        });
      } else {
        ip({"link", "set", "m2n", "down"});
      }
    }
    std::string failure;
    auto began = std::chrono::steady_clock::now();
    try {
      for (std::int64_t version = 2;; ++version) {
        began = std::chrono::steady_clock::now();
        side.run_round(version, kLimit);
      }
    } catch (const TransportError& error) {
      failure = error.what();
    }
    if (cutter.joinable()) {
      cutter.join();
    }
    const auto took = std::chrono::steady_clock::now() - began;
    require(failure.find(group.rank() == 0 ? "1" : "0") != std::string::npos, failure);
    require(took < kLong, "the error came late: " + failure);
  });
  none_failed(ends);
}

BOOST_AUTO_TEST_CASE(a_link_cut_between_rounds_is_an_error_by_the_deadline) { check_cut(false); }

BOOST_AUTO_TEST_CASE(a_link_cut_in_a_round_is_an_error_by_the_deadline) { check_cut(true); }

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
