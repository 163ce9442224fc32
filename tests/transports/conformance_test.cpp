// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Each sentence of core/api/transport.hpp, for every transport that moves bytes, between threads
/// and between processes.

#include <sys/mman.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <new>
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
using testing::require;
using testing::Subject;

const std::vector<Subject> kSubjects = testing::subjects();

constexpr milliseconds kLong{30'000};
constexpr milliseconds kShort{200};

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(conformance)

BOOST_DATA_TEST_CASE(reports_the_name_it_was_made_by, bdata::make(kSubjects), subject) {
  BOOST_TEST(make(subject)->name() == subject.name);
}

BOOST_DATA_TEST_CASE(refuses_options_that_it_does_not_know, bdata::make(kSubjects), subject) {
  BOOST_CHECK_THROW(builtin_registries().transports.create(subject.name, {{{"speed", "9"}}}),
                    Error);
}

BOOST_DATA_TEST_CASE(rounds_move_what_the_source_holds_now, bdata::make(kSubjects), subject) {
  for (const Index elements : {Index{0}, Index{1}, Index{7}, Index{1'000'003}}) {
    const Case c = Case::make(elements);
    none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
      const auto transport = make(subject);
      transport->connect(group, deadline_in(kLong));
      Memory memory(c, group.rank());
      const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                              memory.lend(), deadline_in(kLong));
      for (std::int64_t version = 1; version <= 4; ++version) {
        memory.fill(group.rank() == 0 ? 0 : ceil_div(elements, 2), version);
        group.barrier("filled", deadline_in(kLong));
        session->start(static_cast<std::uint64_t>(version), deadline_in(kLong));
        const RoundReport report = session->wait(deadline_in(kLong));
        require(report.version == static_cast<std::uint64_t>(version), "version of the report");
        require(memory.holds(version), "bytes of version " + std::to_string(version));
        group.barrier("checked", deadline_in(kLong));
      }
    }));
  }
}

/// Regions of many rows, larger than what a transport moves at a time: rows to columns, and a
/// transposed source.
BOOST_DATA_TEST_CASE(large_strided_regions_arrive_element_by_element, bdata::make(kSubjects),
                     subject) {
  constexpr Index kRows = 3001;
  constexpr Index kColumns = 1003;
  const Shape shape{kRows, kColumns};
  const auto rows = std::make_shared<const Layout>(
      Layout::sharded(shape, DType::i64, Mesh({2}, 0), {Placement::shard(0)}));
  const auto transposed = std::make_shared<const Layout>(Layout::explicit_pieces(
      shape, DType::i64, {0, 1}, {{0, {{{0, 0}, shape}, {0, 0, {1, kRows}}}}}));
  const auto columns = std::make_shared<const Layout>(
      Layout::sharded(shape, DType::i64, Mesh({2}, 1), {Placement::shard(1)}));
  const Registries registries = builtin_registries();
  for (const auto& source : {rows, transposed}) {
    Case c{Problem::make({{"w", shape, {source, {"w"}}, {columns, {"w"}}, false}}), {}};
    c.plan = registries.planners.create("direct", {})->plan(c.problem, Topology::single_island(3));
    none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
      const auto transport = make(subject);
      transport->connect(group, deadline_in(kLong));
      Memory memory(c, group.rank());
      const auto each = [](const Layout& layout, Rank rank, const auto& visit) {
        for (const RankPiece& entry : layout.pieces_of(rank)) {
          const auto& [box, view] = entry.piece;
          for (Index i = box.lo[0]; i < box.hi[0]; ++i) {
            for (Index j = box.lo[1]; j < box.hi[1]; ++j) {
              visit(static_cast<std::size_t>((i - box.lo[0]) * view.strides[0] +
                                             (j - box.lo[1]) * view.strides[1]),
                    i * kColumns + j);
            }
          }
        }
      };
      each(*source, group.rank(), [&](std::size_t at, Index value) { memory.source[at] = value; });
      const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                              memory.lend(), deadline_in(kLong));
      session->start(1, deadline_in(kLong));
      session->wait(deadline_in(kLong));
      bool right = true;
      each(*columns, group.rank(),
           [&](std::size_t at, Index value) { right = right && memory.destination[at] == value; });
      require(right, "an element is in another's place");
      group.barrier("checked", deadline_in(kLong));
    }));
  }
}

BOOST_DATA_TEST_CASE(reports_count_bytes_by_peer_once, bdata::make(kSubjects), subject) {
  const Case c = Case::make(10);  // 5 elements of 8 bytes a source rank
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, group.rank());
    const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                            memory.lend(), deadline_in(kLong));
    session->start(1, deadline_in(kLong));
    const RoundReport report = session->wait(deadline_in(kLong));
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    for (const PeerTraffic& peer : report.peers) {
      require(peer.peer != group.rank(), "a peer is another rank");
      require(!peer.path.empty(), "the path is named");
      sent += peer.sent_bytes;
      received += peer.received_bytes;
    }
    const std::vector<std::uint64_t> expected_sent = {80, 40, 0};
    const std::vector<std::uint64_t> expected_received = {0, 40, 80};
    const std::vector<std::uint64_t> expected_copied = {0, 40, 0};
    const auto rank = static_cast<std::size_t>(group.rank());
    require(sent == expected_sent[rank], "sent " + std::to_string(sent));
    require(received == expected_received[rank], "received " + std::to_string(received));
    require(report.copied_bytes == expected_copied[rank], "copied");
    require(report.seconds > 0, "seconds");
  }));
}

/// Rank 0 comes late to the second round: whoever measures sees that its bytes moved after that.
BOOST_DATA_TEST_CASE(a_report_tells_when_the_bytes_of_each_peer_moved, bdata::make(kSubjects),
                     subject) {
  constexpr milliseconds kLate{60};
  const Case c = Case::make(100'000);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, group.rank());
    const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                            memory.lend(), deadline_in(kLong));
    for (const std::uint64_t version : {1ULL, 2ULL, 3ULL}) {
      const bool late = version == 2;
      if (!late || group.rank() != 0) {
        session->start(version, deadline_in(kLong));
      }
      group.barrier("begun", deadline_in(kLong));
      if (late && group.rank() == 0) {
        std::this_thread::sleep_for(kLate);
        session->start(version, deadline_in(kLong));
      }
      const RoundReport report = session->wait(deadline_in(kLong));
      for (const PeerTraffic& peer : report.peers) {
        // What a peer puts here without a word only the peer can tell.
        if (std::isnan(peer.start_seconds) && subject.name != "loopback" && peer.sent_bytes == 0) {
          continue;
        }
        const std::string when = std::to_string(peer.start_seconds) + " to " +
                                 std::to_string(peer.end_seconds) + " of " +
                                 std::to_string(report.seconds) + " s";
        require(0 <= peer.start_seconds && peer.start_seconds <= peer.end_seconds &&
                    peer.end_seconds <= report.seconds,
                when);
        require(!late || peer.peer != 0 || peer.start_seconds > 0.5e-3 * kLate.count(), when);
      }
    }
  }));
}

/// Retrying with the same memory while an earlier session over it ends must not end its
/// registration. C16
BOOST_DATA_TEST_CASE(a_session_that_ends_leaves_its_memory_to_the_others, bdata::make(kSubjects),
                     subject) {
  const Case c = Case::make(50'000);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, group.rank());
    const Program program = make_program(c.plan, c.problem, group.rank());
    std::unique_ptr<Session> old = transport->prepare(program, memory.lend(), deadline_in(kLong));
    for (std::int64_t version = 1; version <= 4; ++version) {
      auto next = transport->prepare(program, memory.lend(), deadline_in(kLong));
      memory.fill(group.rank() == 0 ? 0 : 25'000, version);
      next->start(static_cast<std::uint64_t>(version), deadline_in(kLong));
      if (version % 2 == group.rank() % 2) {
        old.reset();  // while others may be in the round of the next
      }
      next->wait(deadline_in(kLong));
      require(memory.holds(version) || group.rank() == 0, "wrong values");
      group.barrier("checked", deadline_in(kLong));
      old = std::move(next);
    }
  }));
}

/// Memory that no thread may touch any more once it is taken back.
class Pages {
 public:
  explicit Pages(std::uint64_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::munmap(data_, bytes_); }
  LocalBuffer buffer() const {
    return {static_cast<std::byte*>(data_), bytes_, MemorySpace::host, 0};
  }
  void take_back() { ::mprotect(data_, bytes_, PROT_NONE); }

 private:
  std::uint64_t bytes_;
  void* data_;
};

/// A source or a destination that gives up while peers read or write its memory. C16
BOOST_DATA_TEST_CASE(memory_that_is_taken_back_in_a_round_is_not_touched,
                     bdata::make(kSubjects) * bdata::make({0, 2}), subject, quitter) {
  constexpr Index kElements = 1 << 20;
  const Case c = Case::make(kElements);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    Pages source(kElements * 8);
    Pages destination(kElements * 8);
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    auto session =
        transport->prepare(make_program(c.plan, c.problem, group.rank()),
                           {{source.buffer()}, {destination.buffer()}}, deadline_in(kLong));
    session->start(1, deadline_in(kLong));
    if (group.rank() == quitter) {
      std::this_thread::sleep_for(milliseconds(1));
      session.reset();
      source.take_back();
      destination.take_back();
      std::this_thread::sleep_for(milliseconds(50));
      return;
    }
    try {
      session->wait(deadline_in(kLong));
    } catch (const TransportError&) {
      return;
    }
    require(false, "a round without one of its ranks was reported as complete");
  }));
}

BOOST_DATA_TEST_CASE(two_sessions_of_one_transport_do_not_disturb_each_other,
                     bdata::make(kSubjects), subject) {
  const Case small = Case::make(9);
  const Case large = Case::make(100'000);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory a(small, group.rank());
    Memory b(large, group.rank());
    const auto first = transport->prepare(make_program(small.plan, small.problem, group.rank()),
                                          a.lend(), deadline_in(kLong));
    const auto second = transport->prepare(make_program(large.plan, large.problem, group.rank()),
                                           b.lend(), deadline_in(kLong));
    a.fill(group.rank() == 0 ? 0 : 5, 1);
    b.fill(group.rank() == 0 ? 0 : 50'000, 2);
    for (Session* session : {first.get(), second.get(), first.get()}) {
      session->start(1, deadline_in(kLong));
      session->wait(deadline_in(kLong));
    }
    require(a.holds(1) && b.holds(2), "both sessions moved their own bytes");
  }));
}

BOOST_DATA_TEST_CASE(relays_pass_on_only_what_has_arrived, bdata::make(kSubjects), subject) {
  // 0 holds all; 1 and 2 need all; 2 gets it from 1, chunk by chunk.
  constexpr Index kElements = 3'000'000;
  const auto one = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::i64, Mesh({1}, 0), {Placement::replicate()}));
  const auto two = std::make_shared<const Layout>(
      Layout::sharded({kElements}, DType::i64, Mesh({2}, 1), {Placement::replicate()}));
  Case c{Problem::make({{"w", {kElements}, {one, {"w"}}, {two, {"w"}}, false}}), {}};
  Pattern pattern;
  pattern.geometry = {one, two};
  constexpr std::uint32_t kChunks = 5;
  for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    pattern.boxes.push_back({{chunk * kElements / kChunks}, {(chunk + 1) * kElements / kChunks}});
    pattern.moves.push_back({chunk, 0, 1, chunk});
    pattern.moves.push_back({chunk, 1, 2, chunk + 1});
  }
  PlanBuilder builder(c.problem, "chain");
  builder.assign(0, builder.add(std::move(pattern)));
  c.plan = std::move(builder).finish();
  check_plan(c.plan, c.problem);
  none_failed(testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, group.rank());
    memory.fill(0, 3);
    const auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()),
                                            memory.lend(), deadline_in(kLong));
    for (int round = 1; round <= 3; ++round) {
      session->start(static_cast<std::uint64_t>(round), deadline_in(kLong));
      session->wait(deadline_in(kLong));
    }
    require(memory.holds(3), "the chain delivered everything");
  }));
}

BOOST_DATA_TEST_CASE(a_rank_that_never_connects_is_named, bdata::make(kSubjects), subject) {
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    if (group.rank() == 1) {
      std::this_thread::sleep_for(2 * kShort);
      return;
    }
    make(subject)->connect(group, deadline_in(kShort));
  });
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    BOOST_TEST(ends[rank].failure.find("connect") != std::string::npos, ends[rank].failure);
    BOOST_TEST(ends[rank].failure.find('1') != std::string::npos, ends[rank].failure);
  }
}

/// What rank 1 does instead of its part of the round.
enum class Fault { stalls, leaves, aborts };

void check_fault(const Subject& subject, Fault fault, Errc expected) {
  const Case c = Case::make(64);
  const auto start = std::chrono::steady_clock::now();
  const auto ends = testing::run_ranks(subject.world, 3, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, group.rank());
    auto session = transport->prepare(make_program(c.plan, c.problem, group.rank()), memory.lend(),
                                      deadline_in(kLong));
    if (group.rank() == 1) {
      if (fault == Fault::stalls) {
        std::this_thread::sleep_for(3 * kShort);
      } else if (fault == Fault::leaves) {
        session->start(1, deadline_in(kLong));
        session.reset();  // between start and wait: its part is never done
      } else {
        session->abort();
      }
      return;
    }
    // Only a stall is for the deadline to end.
    const milliseconds limit = fault == Fault::stalls ? kShort : kLong;
    session->start(1, deadline_in(limit));
    session->wait(deadline_in(limit));
  });
  BOOST_TEST((std::chrono::steady_clock::now() - start < kLong));
  BOOST_TEST(ends[1].failure.empty(), ends[1].failure);
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    BOOST_TEST_REQUIRE(ends[rank].code.has_value(),
                       "rank " << rank << " noticed nothing: " << ends[rank].failure);
    BOOST_TEST((*ends[rank].code == expected || *ends[rank].code == Errc::peer_lost),
               ends[rank].failure);
    BOOST_TEST(ends[rank].failure.find("rank") != std::string::npos, ends[rank].failure);
  }
}

BOOST_DATA_TEST_CASE(a_rank_that_stalls_in_a_round_is_named_by_the_deadline, bdata::make(kSubjects),
                     subject) {
  check_fault(subject, Fault::stalls, Errc::timed_out);
}

BOOST_DATA_TEST_CASE(a_rank_that_leaves_in_a_round_ends_it_for_all, bdata::make(kSubjects),
                     subject) {
  check_fault(subject, Fault::leaves, Errc::peer_lost);
}

// C13
BOOST_DATA_TEST_CASE(abort_ends_the_round_for_all, bdata::make(kSubjects), subject) {
  check_fault(subject, Fault::aborts, Errc::peer_lost);
}

/// A world of one rank, which never has to wait for another: it must notice all the same.
BOOST_DATA_TEST_CASE(an_aborted_round_never_passes_for_a_complete_one, bdata::make(kSubjects),
                     subject) {
  const auto here = std::make_shared<const Layout>(
      Layout::sharded({64}, DType::i64, Mesh({1}, 0), {Placement::replicate()}));
  Case c{Problem::make({{"w", {64}, {here, {"w"}}, {here, {"w"}}, false}}), {}};
  const Registries registries = builtin_registries();
  c.plan = registries.planners.create("direct", {})->plan(c.problem, Topology::single_island(1));
  none_failed(testing::run_ranks(subject.world, 1, [&](Group& group) {
    const auto transport = make(subject);
    transport->connect(group, deadline_in(kLong));
    Memory memory(c, 0);
    memory.fill(0, 1);
    const auto session =
        transport->prepare(make_program(c.plan, c.problem, 0), memory.lend(), deadline_in(kLong));
    session->start(1, deadline_in(kLong));
    session->abort();
    try {
      session->wait(deadline_in(kLong));
    } catch (const TransportError&) {
      return;
    }
    require(memory.holds(1), "a round without its bytes was reported as complete");
  }));
}

BOOST_DATA_TEST_CASE(prepare_before_connect_is_refused, bdata::make(kSubjects), subject) {
  const Case c = Case::make(4);
  Memory memory(c, 0);
  BOOST_CHECK_THROW(make(subject)->prepare(make_program(c.plan, c.problem, 0), memory.lend(),
                                           deadline_in(kShort)),
                    Error);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
