// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/bench_options.hpp"

#include <algorithm>
#include <boost/program_options/parsers.hpp>
#include <boost/program_options/variables_map.hpp>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/cli/bench_workloads.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

namespace po = boost::program_options;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> out;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    out.push_back(part);
  }
  return out;
}

/// @param kind  "planner". @param shared  Settings of all.
std::vector<PluginSpec> specs_of(const std::string& kind, const std::string& list,
                                 const Options& shared) {
  std::vector<PluginSpec> out;
  for (const std::string& text : split(list, ',')) {
    const std::vector<std::string> words = split(text, ':');
    if (words.empty() || words.front().empty()) {
      throw Error(Errc::usage, "--" + kind + " '" + list +
                                   "' has an empty name; expected NAME[:KEY=VALUE...],...");
    }
    PluginSpec spec{text, words.front(), {}};
    std::string key;
    for (std::size_t i = 1; i < words.size(); ++i) {
      const std::size_t equals = words[i].find('=');
      if (equals != words[i].npos && equals > 0) {
        key = words[i].substr(0, equals);
        spec.options[key] = words[i].substr(equals + 1);
      } else if (!key.empty()) {
        spec.options[key] += ":" + words[i];  // a colon of the value
      } else {
        throw Error(Errc::usage,
                    kind + " '" + text + "' has '" + words[i] + "' where KEY=VALUE was expected");
      }
    }
    spec.options.insert(shared.begin(), shared.end());  // its own win
    out.push_back(std::move(spec));
  }
  if (out.empty()) {
    throw Error(Errc::usage, "--" + kind + " names nothing; expected NAME[:KEY=VALUE...],...");
  }
  return out;
}

template <class Value>
Value choice(const char* flag, const std::string& word,
             const std::vector<std::pair<std::string, Value>>& choices) {
  std::string names;
  for (const auto& [name, value] : choices) {
    if (word == name) {
      return value;
    }
    names += (names.empty() ? "" : ", ") + name;
  }
  throw Error(Errc::usage,
              std::string("--") + flag + " is '" + word + "'; the choices are " + names);
}

std::int64_t number(const po::variables_map& variables, const char* flag, std::int64_t least) {
  const auto value = variables[flag].as<std::int64_t>();
  constexpr std::int64_t kMost = 1'000'000;
  if (value < least || value > kMost) {
    throw Error(Errc::usage, std::string("--") + flag + " is " + std::to_string(value) +
                                 "; it must be " + std::to_string(least) + " to " +
                                 std::to_string(kMost));
  }
  return value;
}

bool names_flag(const std::vector<std::string>& words, std::initializer_list<const char*> flags) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return std::any_of(flags.begin(), flags.end(), [&](const std::string& flag) {
      return word == flag || word.starts_with(flag + "=");
    });
  });
}

}  // namespace

po::options_description bench_flags() {
  po::options_description flags("Flags of bench");
  const auto number = [](std::int64_t value) {
    return po::value<std::int64_t>()->default_value(value);
  };
  flags.add_options()  //
      ("workload", po::value<std::string>()->default_value(""),
       "what moves, with commas: a published model (qwen3-8b), COUNTxSIZE[:LAYOUT] "
       "(1000x1MiB:columns), or models, sweep, layouts, all; the default is the experiment's own, "
       "or sweep. --planner and --transport take lists, too: NAME[:KEY=VALUE...],...; 'all' is "
       "every one")("memory", po::value<std::string>()->default_value("host"),
                    "where buffers lie: host, device")("trainers", number(1),
                                                       "trainer ranks of a named workload")(
          "workers", number(1), "inference ranks of a named workload")(
          "colocated", po::bool_switch(), "worker w is trainer w's rank, too")(
          "order", po::value<std::string>()->default_value("shuffled"),
          "how a worker's buffers follow one another: shuffled, or declared (as the trainers')")(
          "rounds", number(10), "timed rounds of a cell")("warm-ups", number(2),
                                                          "rounds before them")(
          "limit-mib", number(0),
          "size of the copies that the limit is measured by; 0: 4096 of device memory, 1024 of "
          "host "
          "memory")(
          "scale", po::value<double>()->default_value(0),
          "part of a workload's layers or tensors, above 0 and at most 1; 0: all, but models above "
          "400 GB have as many layers as fit");
  return flags;
}

BenchOptions parse_bench(const std::vector<std::string>& arguments) {
  po::variables_map variables;
  std::vector<std::string> rest;
  try {
    const po::options_description flags = bench_flags();
    const po::parsed_options parsed =
        po::command_line_parser(arguments)
            .options(flags)
            .style(po::command_line_style::default_style & ~po::command_line_style::allow_guessing)
            .allow_unregistered()
            .run();
    po::store(parsed, variables);
    rest = po::collect_unrecognized(parsed.options, po::include_positional);
  } catch (const po::error& error) {
    throw Error(Errc::usage, std::string("command line: ") + error.what());
  }

  BenchOptions out;
  out.memory = choice<MemorySpace>("memory", variables["memory"].as<std::string>(),
                                   {{"host", MemorySpace::host}, {"device", MemorySpace::device}});
  out.order = choice<BufferOrder>(
      "order", variables["order"].as<std::string>(),
      {{"shuffled", BufferOrder::shuffled}, {"declared", BufferOrder::declared}});
  out.trainers = static_cast<Rank>(number(variables, "trainers", 1));
  out.workers = static_cast<Rank>(number(variables, "workers", 1));
  out.colocated = variables["colocated"].as<bool>();
  out.rounds = static_cast<std::uint64_t>(number(variables, "rounds", 1));
  out.warm_ups = static_cast<std::uint64_t>(number(variables, "warm-ups", 0));
  out.limit_bytes = static_cast<std::uint64_t>(number(variables, "limit-mib", 0)) << 20;
  out.scale = variables["scale"].as<double>();
  if (!(out.scale >= 0 && out.scale <= 1)) {
    throw Error(Errc::usage, "--scale must be above 0 and at most 1, or 0 for what fits");
  }

  Experiment& experiment = out.experiment;
  experiment = parse_experiment(rest);
  experiment.command_line.clear();
  for (const std::string& word : arguments) {
    experiment.command_line += (experiment.command_line.empty() ? "" : " ") + word;
  }
  out.own_workload = !experiment.problem.empty() || !experiment.model_family.empty() ||
                     !experiment.model_config.empty();
  if (variables["rounds"].defaulted() && !experiment.file.empty()) {
    out.rounds = experiment.rounds;
  }
  if (out.memory == MemorySpace::device && experiment.file.empty() &&
      !names_flag(rest, {"--transport", "--transport.name"})) {
    experiment.transport = "nccl";
  } else if (experiment.transport.empty()) {
    experiment.transport = "loopback";  // cells are threads
  }
  out.planners = specs_of("planner", experiment.planner, experiment.planner_options);
  out.transports = specs_of("transport", experiment.transport, experiment.transport_options);
  const auto& asked = variables["workload"].as<std::string>();
  for (const std::string& name : split(asked.empty() && !out.own_workload ? "sweep" : asked, ',')) {
    for (std::string& entry : workload_names(name)) {
      out.workloads.push_back(std::move(entry));
    }
  }
  return out;
}

}  // namespace m2n::cli
