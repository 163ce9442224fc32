// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Ranks that are processes, for tests: this program started again, once a rank, with a group over
/// a shared file.

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api/group.hpp"

namespace m2n::testing {

/// What rank processes run, by name. Filled before main() reaches run_if_rank().
using RankBody = std::function<void(Group&, const std::string& argument)>;
std::map<std::string, RankBody>& rank_bodies();

/// In a process that start_ranks() made: runs its body and ends the process (status 0, or 1 with
/// the error on stderr). Otherwise does nothing. Call it before CUDA is touched.
void run_if_rank();

/// In a rank process: a second group of @p size ranks, once, for those that are left.
std::unique_ptr<Group> second_group(Rank rank, Rank size);

struct RankEnd {
  bool exited = false;
  bool stopped = false;  ///< And has not ended since.
  int status = -1;       ///< Exit status, or minus the signal.
  double seconds = 0;
  std::string error;  ///< What the rank's body threw.
};

struct RankProcesses {
  std::vector<pid_t> processes;
  std::string file;
};

/// Starts @p count processes; each has its own NCCL_HOSTID when @p apart.
RankProcesses start_ranks(Rank count, const std::string& body, const std::string& argument,
                          bool apart);
/// Waits for all of them, at most @p patience, or until those that are left are stopped; then
/// kills the rest.
std::vector<RankEnd> wait_ranks(RankProcesses& ranks, std::chrono::seconds patience);

}  // namespace m2n::testing
