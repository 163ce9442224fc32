// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Experiments: an INI file with sections, every key also a flag.

#include <boost/program_options/options_description.hpp>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/registry.hpp"
#include "core/layout/mesh.hpp"
#include "core/plan/simulate.hpp"

namespace m2n::cli {

/// What only processes of a job are told: `m2n trainer`, `m2n worker` and `m2n launch`.
struct ProcessFlags {
  Rank rank = -1;                    ///< Among those of its part; -1: from the environment.
  std::string master;                ///< HOST:PORT where all ranks meet.
  std::vector<std::string> control;  ///< URLs of the workers' endpoints, or watch:URL.
  std::string listen;                ///< HOST:PORT of worker 0's control endpoint.
  std::string meet;                  ///< HOST:PORT where the workers of a deployment meet.
  std::filesystem::path init_file;   ///< Where trainer 0 writes the body of the init call.
  std::string token;
  std::uint64_t epoch = 1;
  std::size_t slice = 0;
  int max_cta = 0;     ///< 0: no cap.
  bool change = true;  ///< Weights change from round to round.
  bool digest = true;  ///< Compare digests after every round.
  std::string log = "human";
  int master_fd = -1;  ///< Listening sockets that a launcher passes on.
  int listen_fd = -1;
  int meet_fd = -1;
};

/// Everything that a command may be told. A plain value. Paths of an experiment file are relative
/// to the file's folder, those of flags to the working folder.
struct Experiment {
  std::string command_line;       ///< The words after the command, for the record.
  std::filesystem::path file;     ///< Of the experiment; empty when there is none.
  std::filesystem::path problem;  ///< Of a problem file; then model, source and sink need no word.

  std::string model_family;
  std::filesystem::path model_config;  ///< Without a family, its model_type names one.
  std::filesystem::path model_folder;  ///< Of a config.json and perhaps weights; may be empty.
  Options model;

  std::string source_kind = "fsdp";
  Rank source_ranks = 1;
  std::string values;  ///< Empty: the model folder's, or else synthetic.
  std::filesystem::path values_path;
  Options values_options;
  Options source;

  std::string sink_kind = "inplace";
  Rank sink_workers = 1;
  std::int64_t tensor_parallel = 0;  ///< 0: as many as there are workers.
  Options sink;

  std::string planner = "direct";
  Options planner_options;
  std::string transport;  ///< Empty: default_transport().
  Options transport_options;
  std::filesystem::path topology;
  bool relabel = false;  ///< Hand the workers' parts out anew, so that fewer bytes travel.

  std::uint64_t rounds = 1;
  double deadline_seconds = 60;
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;  ///< Of full tensors at a time, each worker.
  MemorySpace memory = MemorySpace::host;             ///< Where both sides' weights live.
  std::vector<int> devices;  ///< CUDA ordinals of the ranks, in turn; empty: all there are.
  bool verify = true;
  bool explain = false;  ///< Of a plan: what every tensor does at the workers, and why.

  SimulateOptions simulation;

  ProcessFlags process;

  std::filesystem::path dump;
  bool dump_shards = true;
  bool dump_per_rank = false;  ///< Shards in one more file a rank.
  int dump_deflate = 0;        ///< zlib's level; 0 for none.

  std::filesystem::path replay;  ///< A dump whose problem and plan are taken.

  std::vector<std::filesystem::path> plugins;
  bool json = false;
};

/// The flags of an experiment, by section, for --help.
boost::program_options::options_description experiment_flags(Experiment& experiment);

/// Parses @p arguments (without program and command): at most one experiment file (or problem file,
/// which is JSON), and flags; flags win. Keys of the form section.key that are not ours go to the
/// section's plug-in.
/// @throws Error{usage} naming the flag or key; Error{io} when the file cannot be read.
Experiment parse_experiment(const std::vector<std::string>& arguments);

}  // namespace m2n::cli
