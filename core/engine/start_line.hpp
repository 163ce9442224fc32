// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Where the ranks of a process wait for one another before a round is timed.

#include <atomic>
#include <cstdint>

#include "core/api/group.hpp"

namespace m2n {

/// Lets all ranks go within about a microsecond, when each has a processor: they spin.
/// - Threads: one a rank; give_up() from any.
class StartLine {
 public:
  explicit StartLine(Rank ranks) : ranks_(static_cast<std::uint32_t>(ranks)) {}

  /// @throws Error{timed_out} when a rank does not come; Error{peer_lost} after give_up().
  void arrive_and_wait(Deadline deadline);
  /// A rank will not come any more.
  void give_up() noexcept { given_up_ = true; }

 private:
  std::uint32_t ranks_;
  std::atomic<std::uint32_t> arrived_{0};
  std::atomic<std::uint64_t> round_{0};
  std::atomic<bool> given_up_{false};
};

}  // namespace m2n
