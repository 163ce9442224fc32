// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The program m2n: picks the command, and turns errors into one sentence and an exit status.

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string_view>

#include "core/cli/bench_options.hpp"
#include "core/cli/commands.hpp"
#include "core/cli/experiment.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

struct Command {
  std::string_view name;
  std::string_view arguments;
  std::string_view summary;
  int (*run)(const Arguments&);
  bool experiment_keys;  ///< Takes the keys of an experiment as flags.
};

constexpr std::array kCommands = {
    Command{"run", "[EXPERIMENT] [--problem FILE] [FLAGS]",
            "one whole experiment: build the shards, plan, move, verify, dump", run_command, true},
    Command{"plan", "[EXPERIMENT] [--problem FILE] [FLAGS]",
            "plan only: what moves between whom, and how good that is", plan_command, true},
    Command{"simulate", "[EXPERIMENT] [--problem FILE] [--topology FILE] [FLAGS]",
            "the plan on a described cluster: how long, and which port decides", simulate_command,
            true},
    Command{"bench",
            "[EXPERIMENT] [--workload W,...] [--planner P,...] [--transport T,...] [FLAGS]",
            "planners, transports and workloads side by side on the same buffers: verified, then "
            "timed",
            bench_command, true},
    Command{"layout", "FILE [FLAGS]",
            "who holds what of an experiment or problem file: one JSON line a parameter, side and "
            "rank",
            layout_command, true},
    Command{"launch", "EXPERIMENT [FLAGS]",
            "all ranks of a job as processes on this machine: rounds of weights that change",
            launch_command, true},
    Command{"trainer", "EXPERIMENT --rank N --master HOST:PORT [--control URL,...] [FLAGS]",
            "one trainer rank of a job", trainer_command, true},
    Command{"worker", "EXPERIMENT --rank N [--listen HOST:PORT] [--meet HOST:PORT] [FLAGS]",
            "one worker of a job; ends when it is told to (SIGTERM)", worker_command, true},
    Command{"inspect", "FILE [--json]", "what a checkpoint or a dump holds", inspect_command,
            false},
    Command{"diff", "DUMP DUMP [--only SECTION]... [--json]",
            "where two dumps differ, and how much, in the sections experiment, parameters, plan, "
            "traffic "
            "and tensors; like "
            "diff: exit status 0 same, 1 different, 2 trouble",
            diff_command, false},
    Command{
        "replay", "DUMP [--transport NAME] [FLAGS]",
        "the plan of a dump, run again and verified; takes the flags transport.*, run.*, dump.*, "
        "topology, source.values, source.path, values.*, plugin and json of 'run'",
        replay_command, false},
    Command{
        "export", "DUMP OUT [--side source|destination] [--rank N]",
        "the tensors of a dump as safetensors: global ones, or those of one rank; into a folder, "
        "or into OUT when that ends in .safetensors",
        export_command, false},
    Command{"list", "[--json] [--plugin FILE]", "what is registered, and what each needs",
            list_command, false},
};

std::string usage() {
  std::ostringstream out;
  out << "m2n: reshards model weights from trainer ranks to inference ranks\n\n"
         "usage: m2n COMMAND ...\n\n";
  for (const Command& command : kCommands) {
    out << "  m2n " << command.name << ' ' << command.arguments << "\n      " << command.summary
        << '\n';
  }
  out << "\n'm2n COMMAND --help' lists the flags. Exit status: 0 done, 1 failed, 2 asked "
         "wrongly.\n";
  return out.str();
}

std::string help(const Command& command) {
  std::ostringstream out;
  out << "usage: m2n " << command.name << ' ' << command.arguments << "\n  " << command.summary
      << "\n\n";
  if (command.run == bench_command) {
    out << bench_flags() << '\n';
  }
  if (command.experiment_keys) {
    Experiment defaults;
    out << experiment_flags(defaults)
        << "\nAn experiment file is an INI file with these sections and keys, for example\n\n"
           "  [model]\n  family = llama\n  config = config.json\n\n"
           "  [source]\n  kind = fsdp\n  ranks = 4\n\n"
           "  [sink]\n  kind = inplace\n  workers = 2\n";
  }
  return out.str();
}

int dispatch(const Arguments& words) {
  if (words.empty() || words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    std::cout << usage();
    return words.empty() ? 2 : 0;
  }
  const auto* const found =
      std::find_if(kCommands.begin(), kCommands.end(),
                   [&](const Command& command) { return command.name == words[0]; });
  if (found == kCommands.end()) {
    std::string names;
    for (const Command& command : kCommands) {
      names += (names.empty() ? "" : ", ") + std::string(command.name);
    }
    throw Error(Errc::usage, "no command '" + words[0] + "'; the commands are " + names);
  }
  const Arguments rest(words.begin() + 1, words.end());
  if (std::find(rest.begin(), rest.end(), "--help") != rest.end()) {
    std::cout << help(*found);
    return 0;
  }
  const int status = found->run(rest);
  if (!std::cout.flush()) {
    throw Error(Errc::io, "standard output cannot be written");
  }
  return status;
}

}  // namespace
}  // namespace m2n::cli

int main(int argc, char** argv) {
  try {
    return m2n::cli::dispatch({argv + 1, argv + argc});
  } catch (const m2n::Error& error) {
    std::fprintf(stderr, "m2n: %s\n", error.what());
    return error.code() == m2n::Errc::usage ? 2 : 1;
  } catch (const std::bad_alloc&) {
    std::fputs("m2n: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "m2n: %s\n", error.what());
  }
  return 1;
}
