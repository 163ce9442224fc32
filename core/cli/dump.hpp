// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The dump of a command: the experiment, its problem and its plan, and what a run adds.

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/cli/job.hpp"
#include "core/io/dump.hpp"

namespace m2n::cli {

/// Of every dump: version, time, command line, the experiment's file, and the variables by which
/// libraries decide how bytes move, as JSON ("environment").
std::map<std::string, std::string> run_facts(const Experiment& experiment);

class Dump {
 public:
  /// Opens the experiment's dump file and writes what is known before a run.
  Dump(const Job& job, const Plan& plan);
  Dump(const Dump&) = delete;
  Dump& operator=(const Dump&) = delete;
  /// Without commit() no file is left behind.
  ~Dump();
  /// Both sides' compact local tensors of one rank, but for those that fell back. Thread-safe.
  void add_shards(const RankView& view);
  /// A tensor that fell back, on its way into load_weights. Thread-safe.
  void add_full_tensor(Rank rank, std::size_t index, const FullTensor& tensor);
  void add_facts(const std::map<std::string, std::string>& facts) { writer_.experiment(facts); }
  /// Link use and staging of every rank, stage by stage, as /results/usage.
  void add_usage(const Plan& plan);
  void add_timeline(const Timeline& timeline) { writer_.timeline(timeline); }
  /// Rounds, phases and digests.
  void add_measurements(const LocalJobReport& report, const std::vector<DumpDigest>& digests);
  void commit();

 private:
  /// Where the shards of @p rank go.
  void write_shard(Role role, Rank rank, const Parameter& parameter, const CompactShard& shard,
                   const std::byte* bytes);

  const Job& job_;
  DumpOptions options_;
  DumpWriter writer_;
  std::mutex mutex_;
  std::map<Rank, std::unique_ptr<DumpWriter>> parts_;  ///< With dump.per_rank.
  bool shards_ = false;
  bool committed_ = false;
};

}  // namespace m2n::cli
