// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// What a group over the store promises its ranks.

#include <boost/test/unit_test.hpp>
#include <numeric>
#include <stdexcept>

#include "core/error.hpp"
#include "tests/core/rendezvous/store_world.hpp"

namespace m2n {
namespace {

using std::chrono::milliseconds;
using testing::long_deadline;
using testing::make_store;
using testing::rank_of;
using testing::run_threads;
using testing::run_world;

const std::vector<std::string> kNothing5(5);

void demand(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error("not so: " + what);
  }
}

/// All bytes, and different for each rank.
std::string value_of(Rank rank) {
  std::string value(257 + static_cast<std::size_t>(rank), '\0');
  std::iota(value.begin(), value.end(), static_cast<char>(rank));
  return value;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(core)
BOOST_AUTO_TEST_SUITE(world_group)

BOOST_AUTO_TEST_CASE(all_gather_gives_every_value_by_rank) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    for (int round = 0; round < 3; ++round) {
      const auto values =
          group.all_gather("values", value_of(group.rank() + round), long_deadline());
      demand(values.size() == 5, "a value a rank");
      for (Rank rank = 0; rank < 5; ++rank) {
        demand(values[static_cast<std::size_t>(rank)] == value_of(rank + round), "in order");
      }
    }
    group.barrier("end", long_deadline());
  });
  BOOST_TEST(thrown == kNothing5, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(broadcast_gives_the_roots_value_and_lets_the_root_run_ahead) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    for (Rank root = 0; root < 5; ++root) {
      const std::string got =
          group.broadcast("b", root, value_of(10 * root + group.rank()), long_deadline());
      demand(got == value_of(10 * root + root), "the root's value");
    }
    if (group.rank() == 4) {
      group.broadcast("ahead", 4, "first", long_deadline());
      group.broadcast("ahead", 4, "second", long_deadline());
      group.send("go", 0, "", long_deadline());
    } else {
      if (group.rank() == 0) {
        group.receive("go", 4, long_deadline());
      }
      demand(group.broadcast("ahead", 4, "", long_deadline()) == "first", "the first value");
      demand(group.broadcast("ahead", 4, "", long_deadline()) == "second", "the second value");
    }
  });
  BOOST_TEST(thrown == kNothing5, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(mail_arrives_in_the_order_of_its_sender_and_also_from_oneself) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    for (Rank to = 0; to < 5; ++to) {
      for (Rank letter = 0; letter < 3; ++letter) {
        group.send("mail", to, value_of(100 * group.rank() + 10 * to + letter), long_deadline());
      }
    }
    for (Rank from = 4; from >= 0; --from) {
      for (Rank letter = 0; letter < 3; ++letter) {
        demand(group.receive("mail", from, long_deadline()) ==
                   value_of(100 * from + 10 * group.rank() + letter),
               "the letters in order");
      }
    }
  });
  BOOST_TEST(thrown == kNothing5, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_verdict_lists_failures_first_and_all_ranks_of_each_side) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    demand(group.agree("same", Statement::value("x"), long_deadline()).unanimous(), "one side");
    const Statement said = group.rank() == 3   ? Statement::failure("no memory")
                           : group.rank() == 1 ? Statement::value("b")
                                               : Statement::value("a");
    const Verdict verdict = group.agree("differ", said, long_deadline());
    demand(explain("differ", verdict) == "phase 'differ': rank 3: no memory", "the failure alone");
    demand(verdict.sides.size() == 3 && verdict.others.empty(), "three sides");
    demand(verdict.sides[0].ranks == std::vector<Rank>{3}, "the failure first");
    demand(verdict.sides[1].ranks == std::vector<Rank>({0, 2, 4}), "then by rank");
    demand(verdict.sides[2].statement == Statement::value("b"), "then the other");
  });
  BOOST_TEST(thrown == kNothing5, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(disagreement_is_the_same_sentence_on_every_rank) {  // C03, C04
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    require_agreement(group, "plan", Statement::value(group.rank() == 2 ? "b" : "a"),
                      long_deadline());
  });
  const std::vector<std::string> expected(
      5, "phase 'plan': ranks 0, 1, 3, 4 have 'a', rank 2 has 'b'");
  BOOST_TEST(thrown == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(ranks_missing_at_the_deadline_are_named_to_all) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    group.barrier("begin", long_deadline());
    if (group.rank() == 1 || group.rank() == 3) {
      // Late: by now the others have given up.
      while (group.failure().empty()) {
        std::this_thread::sleep_for(milliseconds(5));
      }
      group.barrier("work", long_deadline());
    } else {
      group.barrier("work", deadline_in(milliseconds(group.rank() == 0 ? 2'000 : 100'000)));
    }
  });
  const std::vector<std::string> expected(5,
                                          "phase 'work': the deadline passed; ranks missing: 1, 3");
  BOOST_TEST(thrown == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(ranks_that_never_join_are_named) {
  const StoreServer store = make_store();
  const auto thrown = run_threads(2, [&](Rank rank) {
    WorldOptions options = rank_of(store, 2 * rank, 5);
    join_world(options, deadline_in(milliseconds(2'000)));
  });
  BOOST_TEST(thrown[0] == "phase 'rendezvous': the deadline passed; ranks missing: 1, 3, 4");
  BOOST_TEST(thrown[1] == thrown[0]);
}

BOOST_AUTO_TEST_CASE(a_rank_that_leaves_is_named_with_its_reason_to_those_that_need_it) {
  const StoreServer store = make_store();
  const auto thrown = run_world(store, 5, [](WorldGroup& group) {
    group.barrier("begin", long_deadline());
    if (group.rank() == 3) {
      group.leave("no memory left");
      return;
    }
    group.barrier("work", long_deadline());
  });
  for (const Rank rank : {0, 1, 2, 4}) {
    const std::string& text = thrown[static_cast<std::size_t>(rank)];
    BOOST_TEST(text == thrown[0]);
    BOOST_TEST(contains(text, "phase 'work': ranks that have left: 3 (process "), text);
    BOOST_TEST(contains(text, ": no memory left)"), text);
  }
  BOOST_TEST(thrown[3].empty());
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
