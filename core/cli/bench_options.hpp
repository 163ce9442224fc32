// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What `m2n bench` is told: the axes of its matrix, and how each cell is measured.

#include <boost/program_options/options_description.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "core/api/memory.hpp"
#include "core/cli/experiment.hpp"
#include "core/engine/world_buffers.hpp"

namespace m2n::cli {

/// A plug-in and its settings: "nccl:path=wire:blocks=64".
struct PluginSpec {
  std::string text;  ///< As it was asked for, for tables.
  std::string name;
  Options options;
};

/// A plain value.
struct BenchOptions {
  Experiment experiment;      ///< Names and settings that all cells share; perhaps a workload.
  bool own_workload = false;  ///< The experiment has a model or a problem file.
  std::vector<PluginSpec> planners;
  std::vector<PluginSpec> transports;
  std::vector<std::string> workloads;  ///< Groups taken apart; see bench_workloads.hpp.
  MemorySpace memory = MemorySpace::host;
  BufferOrder order = BufferOrder::shuffled;
  Rank trainers = 1;
  Rank workers = 1;
  bool colocated = false;  ///< Worker w is rank w, and not rank trainers + w.
  std::uint64_t warm_ups = 2;
  std::uint64_t rounds = 10;
  std::uint64_t limit_bytes = 0;  ///< Of a copy; 0: see Limit.
  double scale = 0;  ///< Of workloads; 0: whole, but for models that are scaled to fit.
};

/// The flags that an experiment does not have, for --help.
boost::program_options::options_description bench_flags();

/// @throws Error{usage} naming flag, value and choices; what parse_experiment() throws.
BenchOptions parse_bench(const std::vector<std::string>& arguments);

}  // namespace m2n::cli
