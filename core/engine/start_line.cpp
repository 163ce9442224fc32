// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/start_line.hpp"

#include <thread>

#include "core/error.hpp"

namespace m2n {

void StartLine::arrive_and_wait(Deadline deadline) {
  constexpr std::uint32_t kSpins = 4096;  // then others may need the processor
  const std::uint64_t round = round_.load();
  if (arrived_.fetch_add(1) + 1 == ranks_) {
    arrived_.store(0);
    round_.store(round + 1);
    return;
  }
  for (std::uint32_t spins = 0; round_.load() == round; ++spins) {
    if (spins < kSpins) {
      continue;
    }
    if (given_up_) {
      throw Error(Errc::peer_lost, "a rank gave up before the start of a round");
    }
    if (Deadline::clock::now() > deadline) {
      throw Error(Errc::timed_out, "the deadline passed before the start of a round; " +
                                       std::to_string(arrived_.load()) + " of " +
                                       std::to_string(ranks_) + " ranks were there");
    }
    std::this_thread::yield();
  }
}

}  // namespace m2n
