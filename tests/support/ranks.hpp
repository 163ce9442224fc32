// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Runs the ranks of a test as threads of this process, or as processes of their own.

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "core/api/group.hpp"
#include "core/error.hpp"

namespace m2n::testing {

/// Threads that are apart pass for processes: they may not exchange addresses.
enum class World { threads, threads_apart, processes };
std::ostream& operator<<(std::ostream& os, World world);

/// Groups of threads that pass for processes.
std::vector<std::unique_ptr<Group>> make_groups_apart(Rank count);

/// How a rank ended.
struct RankEnd {
  std::string failure;       ///< What it threw, or "ended by signal 9"; empty when all was well.
  std::optional<Errc> code;  ///< Of an m2n::Error.
  int signal = 0;            ///< That ended its process.
};

/// Runs @p body once a rank. Processes are forked from this one, which must have no other threads;
/// what they change in memory is lost, so bodies throw, and only the caller asserts.
std::vector<RankEnd> run_ranks(World world, Rank count, const std::function<void(Group&)>& body);

}  // namespace m2n::testing
