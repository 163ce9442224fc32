// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What `m2n bench` says: JSON lines, a table, a dump. docs/bench.md defines every figure.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/cli/bench_limit.hpp"
#include "core/cli/bench_options.hpp"
#include "core/engine/bench_cell.hpp"
#include "core/plan/plan.hpp"

namespace m2n::cli {

/// One cell, measured or not.
struct BenchRow {
  std::string workload;
  std::string scaled;
  std::string planner;    ///< As it was asked for, with its settings.
  std::string transport;  ///< Likewise.
  Rank trainers = 0;
  Rank workers = 0;
  std::uint64_t payload_bytes = 0;
  std::optional<PlanSummary> plan;  ///< None when there is no plan.
  double plan_seconds = 0;          ///< Of plan() and the slowest rank's make_program().
  double limit_seconds = 0;
  CellReport cell;
};

/// Of the timed rounds, each that of its slowest rank. Quartiles between two rounds are
/// interpolated.
struct Spread {
  double min = 0;
  double q1 = 0;
  double median = 0;
  double q3 = 0;
  double max = 0;
};
/// @pre @p seconds is not empty.
Spread spread_of(std::vector<double> seconds);

class BenchReport {
 public:
  /// With --json prints the line of the machine.
  BenchReport(const BenchOptions& options, const Limit& limit, std::string machine);

  /// Prints the cell: a line of JSON on standard output with --json, and in any case a line for
  /// people on standard error.
  void add(BenchRow row);
  /// Prints the table unless there was JSON, and writes the dump that was asked for.
  /// @param limit  Measured again.
  void finish(const Limit& again) const;

  const std::vector<BenchRow>& rows() const noexcept { return rows_; }

 private:
  std::string table() const;
  void dump(const Limit& again) const;

  const BenchOptions& options_;
  Limit limit_;
  std::string machine_;
  std::vector<BenchRow> rows_;
};

}  // namespace m2n::cli
