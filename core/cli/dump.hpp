// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The dump of a command: the experiment, its problem and its plan, and what a run adds.

#include <atomic>

#include "core/cli/job.hpp"
#include "core/io/dump.hpp"

namespace m2n::cli {

class Dump {
 public:
  /// Opens the experiment's dump file and writes what is known before a run.
  Dump(const Job& job, const Plan& plan);
  /// Both sides' compact local tensors of one rank, but for those that fell back. Thread-safe.
  void add_shards(const RankView& view);
  /// A tensor that fell back, on its way into load_weights. Thread-safe.
  void add_full_tensor(Rank rank, std::size_t index, const FullTensor& tensor);
  void add_facts(const std::map<std::string, std::string>& facts) { writer_.experiment(facts); }
  /// Link use and staging of every rank, stage by stage, as /results/usage.
  void add_usage(const Plan& plan);
  void add_timeline(const Timeline& timeline) { writer_.timeline(timeline); }
  void add_rounds(const LocalJobReport& report);
  void commit();

 private:
  const Job& job_;
  DumpWriter writer_;
  std::atomic<bool> shards_ = false;
};

}  // namespace m2n::cli
