// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Device memory over ucx, without a device: pages of the host that crash whoever touches them (see
/// paged_memory.hpp). What arrives, over which way, and how much host memory is taken for it.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>

#include "core/api/builtin.hpp"
#include "tests/support/paged_memory.hpp"
#include "tests/support/random_cases.hpp"
#include "tests/transports/device_rounds.hpp"
#include "tests/transports/subjects.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::make;
using testing::none_failed;
using testing::require;
using testing::Subject;
using testing::World;

/// Before any house brings a device of its own.
struct Paged {
  Paged() { provide_device_memory(testing::make_paged_memory()); }
};
BOOST_TEST_GLOBAL_FIXTURE(Paged);

Deadline soon() { return deadline_in(std::chrono::seconds(60)); }

/// By each way, with slots and chunks so small that most regions take several.
const std::vector<Subject> kDeviceSubjects = [] {
  std::vector<Subject> out;
  for (const World world : {World::threads, World::processes}) {
    out.push_back({"ucx", world, {{"device_slot_bytes", "4096"}}});
    out.push_back(
        {"ucx", world, {{"tls", "tcp"}, {"slow_lanes", "allow"}, {"chunk_bytes", "256"}}});
    out.push_back({"ucx",
                   world,
                   {{"tls", "tcp"}, {"slow_lanes", "allow"}, {"puts", "on"}, {"put_bytes", "16"}}});
  }
  return out;
}();

/// One tensor of @p bytes from rank 0 to rank 1.
testing::Case whole(Index bytes) {
  const auto on = [&](Rank rank) {
    return std::make_shared<const Layout>(
        Layout::sharded({bytes}, DType::u8, Mesh({1}, rank), {Placement::replicate()}));
  };
  testing::Case c{Problem::make({{"w", {bytes}, {on(0), {"w"}}, {on(1), {"w"}}, false}}), {}};
  c.plan = builtin_registries()
               .planners.create("direct", {})
               ->plan(c.problem, Topology::single_island(2));
  return c;
}

BOOST_AUTO_TEST_SUITE(transports)
BOOST_AUTO_TEST_SUITE(ucx_device)

BOOST_DATA_TEST_CASE(random_problems_arrive_from_device_to_device, bdata::make(kDeviceSubjects),
                     subject) {
  const std::uint64_t seed = testing::test_seed();
  const std::uint64_t cases = testing::random_cases() / 200;
  none_failed(testing::run_ranks(subject.world, 4, [&](Group& group) {
    const auto transport = make(subject);
    testing::move_random_problems(group, *transport, group.rank() % 2, seed, cases);
  }));
}

BOOST_AUTO_TEST_CASE(staging_is_bounded_and_the_report_says_so) {
  constexpr std::uint64_t kSlot = 64 << 10;
  constexpr std::uint64_t kBytes = 64 << 20;
  const testing::Case c = whole(kBytes);
  none_failed(testing::run_ranks(World::processes, 2, [&](Group& group) {
    const auto transport =
        make({"ucx", World::processes, {{"device_slot_bytes", std::to_string(kSlot)}}});
    transport->connect(group, soon());
    const Memory& memory = memory_of(MemorySpace::device);
    const auto arena = memory.reserve(kBytes, 0);
    const LocalBuffer buffer = arena->take(kBytes);
    const bool sends = group.rank() == 0;
    const Buffers buffers = sends ? Buffers{{buffer}, {{}}} : Buffers{{{}}, {buffer}};
    std::vector<std::byte> values(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) {
      values[i] = static_cast<std::byte>(i * 7 + (i >> 8) * 3 + (i >> 16));
    }
    if (sends) {
      memory.write(buffer, values);
    }
    auto session =
        transport->prepare(make_program(c.plan, c.problem, group.rank()), buffers, soon());
    session->start(1, soon());
    const RoundReport report = session->wait(soon());
    require(report.peers.at(0).path.starts_with("ring staged through pinned memory ("),
            report.peers.at(0).path);
    constexpr std::uint64_t kMost = 4 * kSlot + 4096;
    const std::uint64_t pinned = testing::pinned_bytes();
    require(pinned > 4 * kSlot && pinned <= kMost, "pinned " + std::to_string(pinned));
    const auto extra = session->extra_bytes();
    require(extra && *extra <= kMost && (sends || *extra >= 4 * kSlot), "extra bytes");
    if (!sends) {
      std::vector<std::byte> arrived(kBytes);
      memory.read(buffer, arrived);
      require(arrived == values, "bytes differ");
    }
    group.barrier("checked", soon());
    session.reset();
    require(testing::pinned_bytes() == 0, "pinned memory stays");
  }));
}

BOOST_AUTO_TEST_CASE(device_memory_over_slow_lanes_is_refused_by_all_unless_it_is_allowed) {
  const testing::Case c = whole(1000);
  const auto ends = testing::run_ranks(World::processes, 2, [&](Group& group) {
    const auto transport = make({"ucx", World::processes, {{"tls", "tcp"}}});
    transport->connect(group, soon());
    const auto arena = memory_of(MemorySpace::device).reserve(1000, 1);
    const Buffers buffers =
        group.rank() == 0 ? Buffers{{arena->take(1000)}, {{}}} : Buffers{{{}}, {arena->take(1000)}};
    transport->prepare(make_program(c.plan, c.problem, group.rank()), buffers, soon());
  });
  for (const testing::RankEnd& end : ends) {
    BOOST_TEST(
        end.failure.find("memory of device 1 would travel between ranks") != std::string::npos,
        end.failure);
    BOOST_TEST(end.failure.find("over slow lanes (tcp") != std::string::npos, end.failure);
    BOOST_TEST(end.failure.find("slow_lanes allow") != std::string::npos, end.failure);
  }
}

BOOST_AUTO_TEST_CASE(a_device_that_is_not_there_and_buffers_of_two_devices_are_refused_by_all) {
  const testing::Case c = whole(64);
  struct Row {
    int first;
    int second;
    const char* part;
  };
  for (const Row& row : {Row{2, 2,
                             "rank 0: transport 'ucx' was lent a buffer on device 2, expected "
                             "one of the 2 devices"},
                         Row{0, 1, "and one on device 0, expected buffers of one device a rank"}}) {
    const auto ends = testing::run_ranks(World::processes, 2, [&](Group& group) {
      const auto transport = make({"ucx", World::processes});
      transport->connect(group, soon());
      std::vector<std::byte> bytes(64);
      const LocalBuffer first{bytes.data(), 64, MemorySpace::device, row.first};
      const LocalBuffer second{bytes.data(), 64, MemorySpace::device, row.second};
      const Buffers buffers = group.rank() == 0 ? Buffers{{first}, {second}}
                                                : Buffers{{{}}, {host_buffer(bytes.data(), 64)}};
      transport->prepare(make_program(c.plan, c.problem, group.rank()), buffers, soon());
    });
    for (const testing::RankEnd& end : ends) {
      BOOST_TEST(end.failure.find(row.part) != std::string::npos, end.failure);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
