// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Garbage, half-open and slow clients of the store, beside a job that must not notice.

#include <sys/resource.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <limits>
#include <map>
#include <memory>

#include "core/rendezvous/connection.hpp"
#include "core/rendezvous/identity.hpp"
#include "core/rendezvous/secrets.hpp"
#include "core/rendezvous/world.hpp"
#include "tests/core/rendezvous/child_processes.hpp"
#include "tests/core/rendezvous/store_world.hpp"
#include "tests/support/mutate.hpp"
#include "tests/support/random_cases.hpp"

namespace m2n {
namespace {

using std::chrono::milliseconds;
using testing::Dice;
using testing::kToken;
using testing::long_deadline;
using testing::make_store;
using testing::mutate;
using testing::random_bytes;
using testing::rank_of;
using testing::run_world;
using wire::Kind;
using wire::Writer;

constexpr Rank kRanks = 4;

/// 100,000 unless the environment says otherwise.
std::uint64_t frame_count() { return 5 * testing::random_cases(); }

/// A frame as a client sends it.
std::string frame(Kind kind, std::uint64_t request, const std::string& payload) {
  const auto header = wire::encode({payload.size(), kind, request});
  return std::string(header.data(), header.size()) + payload;
}

/// A request that a rank might make, right or nearly so.
std::pair<Kind, std::string> some_request(Dice& dice, std::uint64_t sequence) {
  const std::string phase = dice.chance(80) ? "a" : "b";
  const auto rank = static_cast<Rank>(dice.below(kRanks + 1));
  const std::uint64_t wait_us = dice.chance(50) ? 0 : 1'000'000'000;
  switch (dice.below(10)) {
    case 0:
    case 1: {
      wire::Collective call;
      call.operation = static_cast<wire::Operation>(dice.below(4));
      call.sequence = dice.chance(90) ? sequence : dice.below(5);
      call.phase = phase;
      call.root = rank;
      call.wait_us = wait_us;
      call.failed = dice.chance(10);
      const std::string value = random_bytes(dice, 40);
      call.value = value;
      return {Kind::collective, wire::encode_collective(call)};
    }
    case 2:
      return {Kind::send, Writer().text(phase).rank(rank).text(random_bytes(dice, 40)).take()};
    case 3:
      return {Kind::receive, Writer().text(phase).rank(rank).u64(wait_us).take()};
    case 4:
      return {Kind::set, Writer().text("key").text(random_bytes(dice, 10)).take()};
    case 5:
      return {Kind::get, Writer().text(phase).u64(wait_us).take()};
    case 6:
      return {Kind::add, Writer().text(phase).u64(dice.below(UINT64_MAX)).take()};
    case 7:
      return {dice.chance(50) ? Kind::try_get : Kind::erase, Writer().text(phase).take()};
    case 8:
      return {Kind::peers, ""};
    default:
      return {dice.chance(50) ? Kind::leave : Kind::abort, Writer().text("tired").take()};
  }
}

std::string some_hello(Dice& dice, const std::string& token, std::string_view challenge) {
  wire::Hello hello;
  hello.epoch = dice.below(3);
  hello.world = "world " + std::to_string(dice.below(50));
  hello.size = static_cast<Rank>(dice.below(4));
  hello.rank = static_cast<Rank>(dice.below(4));
  hello.peer = this_peer();
  hello.wait_us = dice.below(1000);
  hello.nonce = make_nonce();
  return wire::encode_hello(hello, token, challenge);
}

/// Sends @p frames hostile frames to @p port: without the token, and with it in worlds of its own.
void attack(std::uint16_t port, std::uint64_t seed, std::uint64_t frames) {
  Dice dice(seed);
  for (std::uint64_t sent = 0; sent < frames;) {
    StreamSocket socket = StreamSocket::open("127.0.0.1", port, long_deadline());
    std::string challenge(wire::kHeaderBytes + kNonceBytes, '\0');
    std::string bytes;
    try {
      if (dice.chance(40)) {
        for (std::uint64_t more = 1 + dice.below(4); more > 0; --more, ++sent) {
          bytes += dice.chance(50) ? random_bytes(dice, 200)
                                   : frame(static_cast<Kind>(1 + dice.below(20)), dice.below(9),
                                           random_bytes(dice, 100));
        }
      } else {
        socket.read(challenge.data(), challenge.size(), long_deadline());
        const bool right = dice.chance(70);
        const std::string hello =
            some_hello(dice, right ? kToken : "a guess", challenge.substr(wire::kHeaderBytes));
        bytes = frame(Kind::hello, 0, hello);
        if (dice.chance(20)) {
          bytes = mutate(dice, bytes);
        }
        ++sent;
        for (std::uint64_t more = dice.below(40); more > 0; --more, ++sent) {
          const auto [kind, payload] = some_request(dice, 0);
          const std::string request = frame(kind, sent, payload);
          bytes += dice.chance(50) ? request : mutate(dice, request);
        }
      }
      socket.write(bytes, long_deadline());
      if (dice.chance(30)) {
        char some[64];
        socket.read_some(some, sizeof some, deadline_in(milliseconds(1)));
      }
    } catch (const ConnectionBroken&) {
      // The store hung up, as it should.
    } catch (const ConnectionSlow&) {
      // It waits for the rest of a frame.
    }
  }
}

/// The job: rounds of every kind of call until told to stop, each checked.
void work(WorldGroup& group, const std::atomic<bool>& stop, std::atomic<std::uint64_t>& rounds) {
  const auto demand = [](bool holds) {
    if (!holds) {
      throw std::runtime_error("the job got a wrong answer");
    }
  };
  const Rank right = (group.rank() + 1) % kRanks;
  const Rank left = (group.rank() + kRanks - 1) % kRanks;
  for (std::uint64_t round = 0;; ++round) {
    const std::string mine = std::to_string(round) + " of " + std::to_string(group.rank());
    const auto values = group.all_gather("gather", mine, long_deadline());
    for (Rank rank = 0; rank < kRanks; ++rank) {
      demand(values.at(static_cast<std::size_t>(rank)) ==
             std::to_string(round) + " of " + std::to_string(rank));
    }
    group.send("ring", right, mine, long_deadline());
    demand(group.receive("ring", left, long_deadline()) ==
           std::to_string(round) + " of " + std::to_string(left));
    require_agreement(group, "agree", Statement::value(std::to_string(round)), long_deadline());
    const bool last = group.rank() == 0 && stop;
    if (group.broadcast("go on", 0, last ? "stop" : "go", long_deadline()) == "stop") {
      return;
    }
    ++rounds;
  }
}

/// Runs the job while @p attackers do their work.
void work_beside(const StoreServer& store, const std::function<void()>& attackers) {
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> rounds = 0;
  std::atomic<bool> over = false;
  std::vector<std::string> thrown;
  std::thread job([&] {
    thrown = run_world(store, kRanks, [&](WorldGroup& group) { work(group, stop, rounds); });
    over = true;
  });
  const auto wait_for_rounds = [&](std::uint64_t count) {
    while (rounds < count && !over) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  };
  wait_for_rounds(5);
  attackers();
  // It has not only survived: it goes on.
  wait_for_rounds(rounds + 5 * kRanks);
  stop = true;
  job.join();
  BOOST_TEST(thrown == std::vector<std::string>(kRanks), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(hostile_store)

BOOST_AUTO_TEST_CASE(hostile_frames_do_not_touch_a_running_job) {
  const std::uint64_t seed = testing::test_seed();
  const StoreServer store = make_store();
  work_beside(store, [&] {
    std::thread other([&] { attack(store.port(), seed, frame_count() / 2); });
    attack(store.port(), seed + 1, frame_count() / 2);
    other.join();
  });
}

BOOST_AUTO_TEST_CASE(a_world_survives_whatever_its_ranks_send) {
  Dice dice(testing::test_seed());
  for (std::uint64_t frames = 0; frames < frame_count();) {
    std::map<Rank, std::uint64_t> failures;
    std::uint64_t answers = 0;
    World world(kRanks, 1, 1U << 20U,
                [&](Rank rank, Kind kind, std::uint64_t, const World::Payload& payload) {
                  answers += payload != nullptr ? 1 : 0;
                  failures[rank] += kind == Kind::failure ? 1 : 0;
                });
    Deadline now{};
    std::vector<bool> gone(kRanks, false);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      wire::Hello hello;
      hello.rank = rank;
      hello.size = kRanks;
      hello.wait_us = 1000;
      BOOST_REQUIRE(!world.refusal(hello).has_value());
      world.join(hello, "proof", now);
    }
    BOOST_REQUIRE(answers == kRanks);
    std::vector<std::uint64_t> sequences(kRanks, 0);
    for (std::uint64_t more = 1 + dice.below(60); more > 0; --more, ++frames) {
      const auto rank = static_cast<Rank>(dice.below(kRanks));
      const auto at = static_cast<std::size_t>(rank);
      if (gone[at]) {
        continue;
      }
      auto [kind, payload] = some_request(dice, sequences[at]);
      if (dice.chance(10)) {
        payload = mutate(dice, payload);
      }
      sequences[at] += kind == Kind::collective ? 1 : 0;
      try {
        world.request(rank, {payload.size(), kind, frames}, payload, now);
      } catch (const wire::Malformed& error) {
        world.gone(rank, error.what());
        gone[at] = true;
      }
      now += std::chrono::microseconds(dice.below(100'000));
      world.expire(now);
    }
    // Whatever happened: nobody waits past the last deadline, and nobody fails twice.
    world.expire(now + std::chrono::hours(24 * 366));
    BOOST_REQUIRE(!world.next_deadline().has_value());
    for (const auto& [rank, count] : failures) {
      BOOST_REQUIRE_MESSAGE(count <= 1, "rank " << rank << " failed " << count << " times");
    }
  }
}

BOOST_AUTO_TEST_CASE(half_open_clients_are_hung_up_on) {
  const StoreServer store(ListenSocket::reserve("127.0.0.1", 0),
                          {.token = kToken, .handshake_time = milliseconds(200)});
  work_beside(store, [&] {
    std::vector<StreamSocket> sockets;
    for (int client = 0; client < 50; ++client) {
      sockets.push_back(StreamSocket::open("127.0.0.1", store.port(), long_deadline()));
      if (client % 2 == 1) {
        sockets.back().write(std::string("\x10\0\0", 3), long_deadline());
      }
    }
    for (StreamSocket& socket : sockets) {
      std::string challenge(wire::kHeaderBytes + kNonceBytes, '\0');
      socket.read(challenge.data(), challenge.size(), long_deadline());
      char more = 0;
      BOOST_TEST(socket.read_some(&more, 1, long_deadline()) == 0U);
    }
  });
}

BOOST_AUTO_TEST_CASE(a_crowd_of_strangers_does_not_keep_a_rank_out) {
  const StoreServer store(ListenSocket::reserve("127.0.0.1", 0),
                          {.token = kToken, .max_strangers = 8});
  std::vector<StreamSocket> crowd;
  for (int client = 0; client < 40; ++client) {
    crowd.push_back(StreamSocket::open("127.0.0.1", store.port(), long_deadline()));
  }
  join_world(rank_of(store, 0, 1), long_deadline())->barrier("alone", long_deadline());
}

BOOST_AUTO_TEST_CASE(a_store_out_of_descriptors_still_lets_a_rank_in) {
  testing::ChildProcesses processes;
  const ListenSocket socket = ListenSocket::reserve("127.0.0.1", 0);
  processes.start(0, [&](const testing::ChildProcesses::Report& report) {
    const StoreServer store(socket.share(), {.token = kToken});
    const rlimit few{.rlim_cur = 40, .rlim_max = 40};
    ::setrlimit(RLIMIT_NOFILE, &few);
    report("serving");
    std::this_thread::sleep_for(std::chrono::minutes(2));
  });
  BOOST_TEST(processes.line(0) == "serving");
  std::vector<StreamSocket> crowd;
  for (int client = 0; client < 100; ++client) {
    crowd.push_back(StreamSocket::open("127.0.0.1", socket.port(), long_deadline()));
  }
  WorldOptions options;
  options.port = socket.port();
  options.token = kToken;
  join_world(options, long_deadline())->barrier("alone", long_deadline());
}

BOOST_AUTO_TEST_CASE(a_client_that_reads_nothing_is_not_read_from) {
  const StoreServer store = make_store();
  work_beside(store, [&] {
    Connection slow(StreamSocket::open("127.0.0.1", store.port(), long_deadline()));
    const Frame challenge = slow.receive(long_deadline());
    wire::Hello hello;
    hello.world = "slow";
    hello.size = 1;
    hello.peer = this_peer();
    hello.nonce = make_nonce();
    slow.send(Kind::hello, 0, wire::encode_hello(hello, kToken, challenge.payload),
              long_deadline());
    slow.send(Kind::set, 1, Writer().text("k").text(std::string(100'000, 'x')).take(),
              long_deadline());
    // More answers than sockets hold; nobody takes them, until the store takes no more requests.
    constexpr std::uint64_t kRequests = 200'000;
    std::uint64_t request = 1;
    try {
      while (request < kRequests) {
        slow.send(Kind::try_get, ++request, Writer().text("k").take(),
                  deadline_in(milliseconds(300)));
      }
    } catch (const ConnectionSlow&) {
      // As it should be.
    }
    BOOST_TEST(request < kRequests);
  });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
