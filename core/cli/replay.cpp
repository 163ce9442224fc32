// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n replay`: the plan of a dump, run again.

#include <algorithm>
#include <array>
#include <string_view>

#include "core/cli/commands.hpp"
#include "core/cli/run.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

/// Everything else is the dump's to say.
constexpr std::array<std::string_view, 16> kFlags = {
    "memory",        "devices",     "transport", "rounds",       "deadline", "topology",
    "dump",          "plugin",      "json",      "transport.",   "run.",     "dump.",
    "source.values", "source.path", "values.",   "topology.file"};

void require_known(const std::string& word) {
  const std::string_view flag = std::string_view(word).substr(2, word.find('=') - 2);
  const bool known = std::any_of(kFlags.begin(), kFlags.end(), [&](std::string_view entry) {
    return entry.back() == '.' ? flag.starts_with(entry) : flag == entry;
  });
  if (!known) {
    throw Error(Errc::usage, "replay has no flag --" + std::string(flag) +
                                 ": problem and plan are the dump's; see --help for what it takes");
  }
}

}  // namespace

int replay_command(const Arguments& arguments) {
  if (arguments.empty() || arguments.front().starts_with("--")) {
    throw Error(Errc::usage, "replay needs a dump, before any flags");
  }
  for (const std::string& word : arguments) {
    if (word.starts_with("--")) {
      require_known(word);
    }
  }
  Experiment experiment = parse_experiment({arguments.begin() + 1, arguments.end()});
  if (!experiment.file.empty() || !experiment.problem.empty()) {
    throw Error(Errc::usage, "replay takes one file, a dump");
  }
  experiment.replay = arguments.front();
  experiment.command_line = arguments.front() + " " + experiment.command_line;
  return run_experiment(experiment, "m2n replay");
}

}  // namespace m2n::cli
