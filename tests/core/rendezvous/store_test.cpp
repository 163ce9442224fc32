// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The store itself: who may join, epochs, keys, reserved ports, its end.

#include <sys/resource.h>
#include <sys/socket.h>

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <ostream>

#include "core/error.hpp"
#include "core/rendezvous/rank_list.hpp"
#include "tests/core/rendezvous/child_processes.hpp"
#include "tests/core/rendezvous/store_world.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using std::chrono::milliseconds;
using testing::kToken;
using testing::long_deadline;
using testing::make_store;
using testing::open_descriptors;
using testing::rank_of;
using testing::run_threads;
using testing::run_world;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.what();
  }
  return "nothing was thrown";
}

/// Why a lone rank cannot join.
std::string join_error(const WorldOptions& options, Deadline deadline = long_deadline()) {
  return error_of([&] { join_world(options, deadline); });
}

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(store)

struct ListCase {
  std::vector<Rank> ranks;
  const char* text;
};
std::ostream& operator<<(std::ostream& os, const ListCase& c) { return os << c.text; }
const std::vector<ListCase> kLists = {
    {{}, "ranks "},
    {{7}, "rank 7"},
    {{0, 1}, "ranks 0, 1"},
    {{0, 1, 2}, "ranks 0-2"},
    {{1, 3, 4, 5, 6, 9, 10}, "ranks 1, 3-6, 9, 10"},
};

BOOST_DATA_TEST_CASE(runs_of_ranks_are_joined_in_sentences, bdata::make(kLists), c) {
  BOOST_TEST(name_ranks(c.ranks) == c.text);
}

BOOST_AUTO_TEST_CASE(a_wrong_token_is_refused_at_once_and_the_world_goes_on) {
  const StoreServer store = make_store();
  WorldOptions stranger = rank_of(store, 0, 2);
  for (const std::string token : {"", "the token of the test", "the token of the tests ", "x"}) {
    stranger.token = token;
    BOOST_TEST(join_error(stranger) ==
               "bad argument: phase 'rendezvous': the token is not that of this job");
  }
  const auto thrown =
      run_world(store, 2, [](WorldGroup& group) { group.barrier("work", long_deadline()); });
  BOOST_TEST(thrown == std::vector<std::string>(2), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_store_for_everybody_needs_a_token) {
  BOOST_TEST(
      contains(error_of([] { const StoreServer store(ListenSocket::reserve("0.0.0.0", 0), {}); }),
               "give the job a token, or listen on 127.0.0.1"));
  const StoreServer with_token(ListenSocket::reserve("0.0.0.0", 0), {.token = "x"});
  const StoreServer local(ListenSocket::reserve("127.0.0.1", 0), {});
  WorldOptions alone;
  alone.port = local.port();
  BOOST_TEST(join_world(alone, long_deadline())->in_process());
}

BOOST_AUTO_TEST_CASE(ranks_that_do_not_fit_the_world_are_told_why) {
  const StoreServer store = make_store();
  WorldOptions options = rank_of(store, 1, 3);
  options.epoch = 1;
  // Two processes believe to be rank 1; whichever comes second is refused.
  const auto thrown =
      run_threads(2, [&](Rank) { join_world(options, deadline_in(milliseconds(1500))); });
  const std::string& first = contains(thrown[0], "is taken") ? thrown[1] : thrown[0];
  const std::string& second = contains(thrown[0], "is taken") ? thrown[0] : thrown[1];
  BOOST_TEST(first == "phase 'rendezvous': the deadline passed; ranks missing: 0, 2");
  BOOST_TEST(contains(second, "phase 'rendezvous': rank 1 of world 'job' is taken by process "),
             second);
  BOOST_TEST(contains(join_error(rank_of(store, 0, 2)),
                      "rank 0 expects 2 ranks in world 'job', which has 3"));
}

BOOST_AUTO_TEST_CASE(worlds_of_one_store_do_not_touch_each_other) {
  const StoreServer store = make_store();
  const auto thrown = run_threads(4, [&](Rank thread) {
    WorldOptions options = rank_of(store, thread % 2, 2);
    options.world = thread < 2 ? "a" : "b";
    const auto group = join_world(options, long_deadline());
    group->set("key", options.world, long_deadline());
    group->barrier("set", long_deadline());
    if (group->get("key", long_deadline()) != options.world) {
      throw std::runtime_error("a key of another world");
    }
    if (thread == 0) {
      group->abort("tired");
    }
    group->barrier("after", long_deadline());
  });
  BOOST_TEST(thrown[0] == "rank 0 gave up: tired");
  BOOST_TEST(thrown[1] == thrown[0]);
  BOOST_TEST(thrown[2].empty());
  BOOST_TEST(thrown[3].empty());
}

BOOST_AUTO_TEST_CASE(keys_are_set_waited_for_counted_and_erased) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 3, [](WorldGroup& group) {
    const auto demand = [](bool holds) {
      if (!holds) {
        throw std::runtime_error("a key is wrong");
      }
    };
    const Deadline soon = long_deadline();
    if (group.rank() == 0) {
      demand(!group.try_get("late", soon).has_value());
      demand(error_of([&] { group.get("never", deadline_in(milliseconds(20))); }) ==
             "timed out: key 'never': the deadline passed and no rank has set it");
      group.barrier("begin", soon);
      group.set("late", std::string("\0value", 6), soon);
    } else {
      group.barrier("begin", soon);
    }
    demand(group.get("late", soon) == std::string("\0value", 6));
    group.add("count", 5, soon);
    group.add("count", -2, soon);
    group.barrier("counted", soon);
    demand(group.get("count", soon) == "9");
    group.barrier("read", soon);
    if (group.rank() == 1) {
      group.erase("count", soon);
      demand(group.add("count", 1, soon) == 1);
      demand(error_of([&] { group.add("late", 1, soon); }) ==
             "bad argument: key 'late' holds no number to add to");
      demand(group.add("big", INT64_MAX, soon) == INT64_MAX);
      demand(error_of([&] { group.add("big", 1, soon); }) ==
             "bad argument: key 'big' would leave 64 bits");
    }
    group.barrier("end", soon);
  });
  BOOST_TEST(thrown == std::vector<std::string>(3), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_value_over_the_limit_is_refused_before_it_is_sent) {
  const StoreServer store(ListenSocket::reserve("127.0.0.1", 0),
                          {.token = kToken, .max_value_bytes = 1000});
  const auto group = join_world(rank_of(store, 0, 1), long_deadline());
  group->set("most", std::string(1000, 'x'), long_deadline());
  BOOST_TEST(
      contains(error_of([&] { group->all_gather("a", std::string(1001, 'x'), long_deadline()); }),
               "a value of 1001 bytes; the store takes at most 1000"));
  group->barrier("still fine", long_deadline());
}

BOOST_AUTO_TEST_CASE(a_large_value_passes_whole) {
  const StoreServer store = make_store();
  std::string large(20'000'000, '\0');
  for (std::size_t i = 0; i < large.size(); ++i) {
    large[i] = static_cast<char>(i * 2654435761U >> 13U);
  }
  const auto thrown = run_world(store, 3, [&](WorldGroup& group) {
    if (group.broadcast("large", 1, group.rank() == 1 ? large : "", long_deadline()) != large) {
      throw std::runtime_error("another value");
    }
  });
  BOOST_TEST(thrown == std::vector<std::string>(3), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(ranks_out_of_step_are_told_who_is_where) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 2, [](WorldGroup& group) {
    group.barrier("begin", long_deadline());
    if (group.rank() == 0) {
      group.barrier("a", long_deadline());
    } else {
      group.send("first", 0, "", long_deadline());
      group.agree("b", Statement::value(""), long_deadline());
    }
  });
  BOOST_TEST(thrown[0] == thrown[1]);
  BOOST_TEST(contains(thrown[0], "phase 'a' (barrier)"), thrown[0]);
  BOOST_TEST(contains(thrown[0], "phase 'b' (agreement)"), thrown[0]);
  BOOST_TEST(contains(thrown[0], "ranks must agree on the order"), thrown[0]);
}

BOOST_AUTO_TEST_CASE(epochs_follow_each_other_on_a_reserved_port) {
  const ListenSocket reserved = ListenSocket::reserve("127.0.0.1", 0);
  std::unique_ptr<WorldGroup> old;
  for (std::uint64_t epoch = 1; epoch <= 3; ++epoch) {
    WorldOptions options;
    options.port = reserved.port();
    options.token = kToken;
    options.epoch = epoch;
    // Before its store is there: it waits in the kernel's queue.
    std::string early;
    std::thread waiting([&] {
      early = error_of([&] {
        const auto group = join_world(options, long_deadline());
        if (group->epoch() != epoch) {
          throw Error(Errc::io, "another epoch");
        }
        group->barrier("work", long_deadline());
        old.reset();
      });
    });
    {
      StoreServer store(reserved.share(), {.token = kToken, .epoch = epoch});
      waiting.join();
      BOOST_TEST(early == "nothing was thrown");
      options.epoch = epoch - 1;
      options.world = "late";
      if (epoch > 1) {
        BOOST_TEST(join_error(options) ==
                   "peer lost: phase 'rendezvous': epoch " + std::to_string(epoch - 1) +
                       " is over: the store is at epoch " + std::to_string(epoch));
      }
      options.epoch = epoch + 1;
      BOOST_TEST(contains(join_error(options, deadline_in(milliseconds(100))), "missing: 0"));
      options.epoch = kCurrentEpoch;
      BOOST_TEST(join_world(options, long_deadline())->epoch() == epoch);
      options.world = "kept";
      old = join_world(options, long_deadline());
      BOOST_TEST(store.drain(deadline_in(milliseconds(0))) == false);
    }
    // The group of an epoch does not reach into the next one.
    const StoreServer next(reserved.share(), {.token = kToken, .epoch = epoch + 1});
    BOOST_TEST(contains(error_of([&] { old->barrier("work", long_deadline()); }), "has closed"));
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_restarts_waits_for_the_next_epoch) {
  const ListenSocket reserved = ListenSocket::reserve("127.0.0.1", 0);
  WorldOptions options;
  options.port = reserved.port();
  options.token = kToken;
  auto store = std::make_unique<StoreServer>(reserved.share(), StoreOptions{.token = kToken});
  { const auto first = join_world(options, long_deadline()); }
  std::uint64_t epoch = 0;
  std::thread again([&] { epoch = join_world(options, long_deadline())->epoch(); });
  std::this_thread::sleep_for(milliseconds(50));
  store.reset();
  store =
      std::make_unique<StoreServer>(reserved.share(), StoreOptions{.token = kToken, .epoch = 2});
  again.join();
  BOOST_TEST(epoch == 2U);
}

BOOST_AUTO_TEST_CASE(an_abort_by_the_store_ends_waits_also_of_those_that_come_later) {
  StoreServer store = make_store();
  const auto thrown = run_threads(3, [&](Rank rank) {
    if (rank == 0) {
      store.abort("phase 'init': the deployment refused: no such model");
    }
    WorldOptions options = rank_of(store, rank, 3);
    options.epoch = 1;
    join_world(options, long_deadline());
  });
  const std::vector<std::string> expected(3, "phase 'init': the deployment refused: no such model");
  BOOST_TEST(thrown == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(what_was_answered_before_the_store_ended_still_arrives) {
  for (int round = 0; round < 20; ++round) {
    const ListenSocket reserved = ListenSocket::reserve("127.0.0.1", 0);
    const auto thrown = run_threads(4, [&](Rank rank) {
      std::optional<StoreServer> store;
      if (rank == 0) {
        store.emplace(reserved.share(), StoreOptions{.token = kToken});
      }
      WorldOptions options;
      options.port = reserved.port();
      options.token = kToken;
      options.rank = rank;
      options.size = 4;
      const auto group = join_world(options, long_deadline());
      // Rank 0 ends the store as soon as it has its own answer.
      if (group->all_gather("last", std::string(50'000, 'x'), long_deadline()).size() != 4) {
        throw std::runtime_error("too few values");
      }
    });
    BOOST_TEST(thrown == std::vector<std::string>(4), boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(nobody_at_the_address_is_an_error_at_the_deadline_that_names_it) {
  std::uint16_t port = 0;
  { port = ListenSocket::reserve("127.0.0.1", 0).port(); }
  WorldOptions options;
  options.port = port;
  BOOST_TEST(join_error(options, deadline_in(milliseconds(50))) ==
             "timed out: phase 'rendezvous': the deadline passed; ranks missing: 0 (its store at "
             "127.0.0.1:" +
                 std::to_string(port) + ": Connection refused)");
  options.address = "no.such.host.invalid";
  BOOST_TEST(contains(join_error(options), "cannot find the address of host"));
}

BOOST_AUTO_TEST_CASE(a_taken_port_and_a_foreign_descriptor_are_refused) {
  const ListenSocket taken = ListenSocket::reserve("127.0.0.1", 0);
  BOOST_TEST(contains(
      error_of([&] { ListenSocket::reserve("127.0.0.1", taken.port()); }),
      "cannot listen on 127.0.0.1:" + std::to_string(taken.port()) + ": Address already in use"));
  const FileDescriptor plain(::socket(AF_INET, SOCK_STREAM, 0));
  BOOST_TEST(contains(error_of([&] { ListenSocket::adopt(plain.get()); }),
                      "is not a listening TCP socket"));
  BOOST_TEST(contains(error_of([] { ListenSocket::adopt(-1); }), "descriptor -1"));
  ListenSocket copy = taken.share();
  const ListenSocket adopted = ListenSocket::adopt(copy.release());
  BOOST_TEST(adopted.port() == taken.port());
  BOOST_TEST(adopted.loopback());
  BOOST_TEST(!ListenSocket::reserve("0.0.0.0", 0).loopback());
}

BOOST_AUTO_TEST_CASE(ipv6_works_where_the_machine_has_it) {
  std::optional<ListenSocket> socket;
  try {
    socket.emplace(ListenSocket::reserve("::1", 0));
  } catch (const Error&) {
    return;  // No IPv6 here.
  }
  WorldOptions options;
  options.address = "::1";
  options.port = socket->port();
  const StoreServer store(std::move(*socket), {});
  join_world(options, long_deadline())->barrier("alone", long_deadline());
}

BOOST_AUTO_TEST_CASE(jobs_leave_no_descriptor_and_no_port_behind) {
  run_world(make_store(), 2, [](WorldGroup& group) { group.barrier("warm", long_deadline()); });
  const std::size_t before = open_descriptors();
  std::uint16_t port = 0;
  for (int job = 0; job < 20; ++job) {
    const StoreServer store = make_store();
    port = store.port();
    run_world(store, 4, [&](WorldGroup& group) {
      if (job % 2 == 1 && group.rank() == 2) {
        throw std::runtime_error("leaves");
      }
      group.barrier("work", long_deadline());
    });
    WorldOptions stranger = rank_of(store, 0, 1);
    stranger.token = "wrong";
    join_error(stranger);
  }
  BOOST_TEST(open_descriptors() == before);
  BOOST_TEST(ListenSocket::reserve("127.0.0.1", port).port() == port);
}

BOOST_AUTO_TEST_CASE(a_thousand_ranks_in_threads_agree) {
  constexpr Rank kMany = 1000;
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4096);
  ::setrlimit(RLIMIT_NOFILE, &files);
  const StoreServer store = make_store();
  const auto thrown = run_world(store, kMany, [&](WorldGroup& group) {
    for (int phase = 0; phase < 5; ++phase) {
      require_agreement(group, "same", Statement::value("digest"), long_deadline());
    }
    const std::string said = "digest " + std::to_string(group.rank() == 617 ? 1 : 0);
    require_agreement(group, "plan", Statement::value(said), long_deadline());
  });
  const std::vector<std::string> expected(
      kMany, "phase 'plan': ranks 0-616, 618-999 have 'digest 0', rank 617 has 'digest 1'");
  BOOST_TEST((thrown == expected), thrown.front());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
