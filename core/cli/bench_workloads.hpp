// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What `m2n bench` moves: the tensors of published models, and equal tensors in every layout.
///
///   MODEL              a published model's checkpoint tensors, each in a buffer of its own: FSDP2
///                      over the trainers; each worker takes the part that its tensor-parallel
///                      model needs. FILE.json is a config.json of somebody else's.
///   COUNTxSIZE[:LAYOUT]   tensors of SIZE bytes (4KiB, 1MiB, 1GiB) of bf16, [rows, columns]:
///     rows             rows to rows (default)
///     columns          columns to columns
///     cross            rows to columns
///     replicated_sources        every trainer holds all; rows
///     replicated_destinations   rows; every worker wants all
///     slices-B         each worker wants other columns, SIZE in rows of B bytes, of tensors that
///                      are four times as wide as the workers together
///     cast             rows to rows; f32 at the trainers, where a tensor has twice the bytes
///     quantised        rows to rows; f8_e4m3 at the workers, which all have the scales of all
///                      blocks of 128 x 128 as well

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/plan/problem.hpp"

namespace m2n::cli {

struct Workload {
  std::string name;
  std::string scaled;  ///< "12 of 94 layers"; empty for all of it.
  std::unique_ptr<const Problem> problem;
};

struct WorkloadContext {
  const Registries& registries;
  Rank trainers = 1;      ///< Ranks [0, trainers).
  Rank first_worker = 1;  ///< Ranks [first_worker, first_worker + workers).
  Rank workers = 1;
  double scale = 0;  ///< See BenchOptions.
  /// Whether there is memory for it.
  std::function<bool(const Problem&)> fits;
};

/// The workloads of a name: of a group (models, sweep, layouts, all) its members.
/// @throws Error{usage} for a name that is none, with the choices.
std::vector<std::string> workload_names(const std::string& name);

/// @param name  One of workload_names(). @throws Error for a cut that the model does not allow, or
///         a file that cannot be read.
Workload make_workload(const std::string& name, const WorkloadContext& context);

}  // namespace m2n::cli
