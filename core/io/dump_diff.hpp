// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Where two dumps differ, and how much.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/io/dump_tensors.hpp"

namespace m2n {

/// One thing in which two dumps differ.
struct DumpDifference {
  std::string section;  ///< "experiment", "parameters", "plan", "traffic" or "tensors"
  std::string subject;  ///< Of the section: a fact, a parameter, a pair of ranks.
  std::string text;     ///< How it differs, for people; the first dump first.
};

/// Elements in which one tensor of one side differs.
struct TensorDifference {
  Role side = Role::source;
  std::string name;
  std::uint64_t elements = 0;  ///< Compared: every shard's, so replicas count.
  std::uint64_t wrong = 0;     ///< Of these, with other bits.
  Rank rank = 0;               ///< Of the first.
  Dims at;                     ///< Global index of the first.
  double largest = 0;          ///< Difference of two numbers; infinite where one is no number.
};

struct DumpComparison {
  std::vector<DumpDifference> differences;
  std::vector<TensorDifference> tensors;  ///< Those that differ; each has a DumpDifference, too.
  std::uint64_t facts = 0;                ///< Compared.
  std::uint64_t parameters = 0;
  std::uint64_t regions = 0;
  std::uint64_t elements = 0;
  bool same() const noexcept { return differences.empty(); }
};

/// Compares facts (but for the time, the run_id and the command line), parameters with their
/// layouts, plans region by region, traffic, and every element of every shard; where one of the
/// dumps has no shards of a side, what digests say. Not what was measured: two runs never take
/// equally long. Cost: reads both files once; memory for the columns of both plans and blocks of
/// the tensors.
/// @throws Error{io} for a file that is no dump, or damaged.
DumpComparison compare_dumps(const std::filesystem::path& a, const std::filesystem::path& b);

/// The part of compare_dumps() about one side's tensors.
void compare_tensors(const DumpTensors& a, const DumpTensors& b, DumpComparison& out);

}  // namespace m2n
