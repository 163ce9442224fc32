// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the tests of transports are about: which transports, over which ranks, and one small
/// resharding problem.

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/api/transport.hpp"
#include "tests/support/ranks.hpp"

namespace m2n::testing {

/// A transport, and what its ranks are.
struct Subject {
  std::string name;
  World world = World::threads;
  Options options = {};
};
std::ostream& operator<<(std::ostream& os, const Subject& subject);

/// Every transport that moves bytes of host memory, by each of its ways, in each world.
/// M2N_TEST_TRANSPORT names one that needs a device of its own instead, e.g. "nccl".
std::vector<Subject> subjects();
/// Those of them between processes that promise to outlive a lost one.
std::vector<Subject> subjects_between_processes();

std::unique_ptr<Transport> make(const Subject& subject);

/// @throws std::runtime_error{@p what} unless @p ok. For the bodies of ranks.
void require(bool ok, const std::string& what);
/// Checks that no rank has failed.
void none_failed(const std::vector<RankEnd>& ends);

/// A 1-D i64 parameter, sharded over ranks 0 and 1, to rank 2 (all of it) and rank 1 (all of it).
struct Case {
  Problem problem;
  Plan plan;

  static Case make(Index elements);
};

/// One rank's memory for a Case.
struct Memory {
  std::vector<std::int64_t> source;
  std::vector<std::int64_t> destination;

  Memory(const Case& c, Rank rank);
  /// Elements [@p begin, ...) of version @p version.
  void fill(Index begin, std::int64_t version);
  Buffers lend();
  bool holds(std::int64_t version) const;
};

}  // namespace m2n::testing
