// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the workers decided about every tensor, and how much of it lands in place.

#include <boost/json/object.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "core/cli/job.hpp"

namespace m2n::cli {

/// How much goes straight into place. Bytes of a tensor count once, at the workers' dtype; tensors
/// that no worker gets do not count.
struct Coverage {
  std::uint64_t unused_tensors = 0;
  std::uint64_t tensors = 0;
  std::uint64_t direct_tensors = 0;
  std::uint64_t bytes = 0;
  std::uint64_t direct_bytes = 0;
  std::vector<std::uint64_t> received_bytes;       ///< By worker: all that a round brings to it.
  std::vector<std::uint64_t> received_full_bytes;  ///< Of that, full tensors for load_weights.
  std::uint64_t largest_group_bytes = 0;           ///< Of full tensors at a time.

  std::uint64_t max_received_bytes() const;
  /// "1234 of 1240 tensors, 99.1 % of 16.1 GB in place".
  std::string text() const;
  boost::json::object json() const;
};
Coverage coverage_of(const Job& job);

/// One row a tensor; in the table those that differ in numbers of their names alone are one.
std::string explain_text(const Job& job);
boost::json::object explain_json(const Job& job);

}  // namespace m2n::cli
