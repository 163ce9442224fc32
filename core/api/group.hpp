// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A group of ranks that agree on small things: the control side of every collective step.

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/layout/mesh.hpp"

namespace m2n {

/// A point in time that a wait may not pass.
using Deadline = std::chrono::steady_clock::time_point;
inline Deadline deadline_in(std::chrono::milliseconds span) {
  return std::chrono::steady_clock::now() + span;
}
/// @p span after @p deadline, and never past the end of time.
inline Deadline later(Deadline deadline, std::chrono::milliseconds span) {
  return deadline > Deadline::max() - span ? Deadline::max() : deadline + span;
}

/// Ranks [0, size) of one world.
///
/// - Collective: all_gather(), broadcast() and barrier(), by every rank in the same order.
/// - Threads: one object a rank; not thread-safe.
/// - Memory: values are copied.
/// - Streams: none.
/// - Errors: Error{timed_out}, naming the phase and the ranks that did not come; Error{peer_lost}
///   when a rank has left. After either the group cannot be used again.
class Group {
 public:
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group() = default;

  virtual Rank rank() const noexcept = 0;
  virtual Rank size() const noexcept = 0;
  /// True when every rank is a thread of this process, so that addresses may be exchanged.
  virtual bool in_process() const noexcept = 0;

  /// Every rank's @p value, by rank. @param phase  Named in errors; equal on every rank.
  virtual std::vector<std::string> all_gather(std::string_view phase, std::string_view value,
                                              Deadline deadline) = 0;
  /// @p value of @p root, on every rank; other ranks' values are ignored. The root need not wait.
  /// Here by way of all_gather(), which brings each rank a value of each: groups of many ranks have
  /// a way of their own.
  virtual std::string broadcast(std::string_view phase, Rank root, std::string_view value,
                                Deadline deadline) {
    return std::move(all_gather(phase, rank() == root ? value : std::string_view(), deadline)
                         .at(static_cast<std::size_t>(root)));
  }
  virtual void barrier(std::string_view phase, Deadline deadline) = 0;
};

}  // namespace m2n
