// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/experiment.hpp"

#include <algorithm>
#include <boost/program_options/parsers.hpp>
#include <boost/program_options/variables_map.hpp>
#include <charconv>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "core/error.hpp"
#include "core/io/json_reader.hpp"

namespace m2n::cli {
namespace {

namespace po = boost::program_options;

/// Flags that stand for a key.
const std::map<std::string, std::string, std::less<>> kShortFlags = {
    {"problem", "model.problem"},  {"model", "model.family"},   {"source", "source.kind"},
    {"sink", "sink.kind"},         {"planner", "planner.name"}, {"transport", "transport.name"},
    {"topology", "topology.file"}, {"rounds", "run.rounds"},    {"deadline", "run.deadline"},
    {"memory", "run.memory"},      {"devices", "run.devices"},  {"dump", "dump.file"},
    {"rank", "job.rank"},          {"master", "job.master"},    {"control", "job.control"},
    {"listen", "job.listen"},      {"meet", "job.meet"},        {"token", "job.token"},
    {"epoch", "job.epoch"},        {"log", "job.log"},
};

/// Sections whose other keys belong to a plug-in.
Options* plugin_section(Experiment& experiment, std::string_view section) {
  if (section == "model") {
    return &experiment.model;
  }
  if (section == "source") {
    return &experiment.source;
  }
  if (section == "sink") {
    return &experiment.sink;
  }
  if (section == "planner") {
    return &experiment.planner_options;
  }
  if (section == "values") {
    return &experiment.values_options;
  }
  return section == "transport" ? &experiment.transport_options : nullptr;
}

/// A problem file may stand where an experiment file does.
bool is_json(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first != text.npos && text[first] == '{';
}

/// A model may be named, or be found in a folder.
bool is_path(const std::string& word) {
  return word.find('/') != word.npos || word.ends_with(".json") || word == "." || word == "..";
}

bool is_section_key(std::string_view word) {
  return word.find('.') != word.npos && word.find('.') != 0;
}

/// "--rounds 3" to "--run.rounds=3", so that a flag and a key are one thing. Flags without a value
/// stay as they are.
std::vector<std::string> normalized(const std::vector<std::string>& arguments) {
  static const std::set<std::string_view> kSwitches = {"--json", "--help", "--relabel",
                                                       "--explain"};
  std::vector<std::string> out;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (word.rfind("--", 0) != 0 || word == "--" || kSwitches.contains(word)) {
      out.push_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    std::string name = word.substr(2, equals == word.npos ? word.npos : equals - 2);
    if (const auto found = kShortFlags.find(name); found != kShortFlags.end()) {
      name = found->second;
    }
    std::string value;
    if (equals != word.npos) {
      value = word.substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      throw Error(Errc::usage, "flag " + word + " needs a value");
    }
    out.push_back("--" + name + "=" + value);
  }
  return out;
}

/// Stores what no plug-in may know, and hands the rest to the sections.
void store(const po::parsed_options& parsed, po::variables_map& variables, Experiment& experiment,
           const std::string& where) {
  po::parsed_options known(parsed.description, parsed.m_options_prefix);
  for (const po::option& option : parsed.options) {
    if (!option.unregistered) {
      known.options.push_back(option);
      continue;
    }
    const std::size_t dot = option.string_key.find('.');
    Options* section = is_section_key(option.string_key)
                           ? plugin_section(experiment, option.string_key.substr(0, dot))
                           : nullptr;
    if (section == nullptr) {
      throw Error(Errc::usage,
                  where + ": unknown key '" + option.string_key + "'; see --help for the keys");
    }
    // Flags are stored first, and win.
    section->emplace(option.string_key.substr(dot + 1),
                     option.value.empty() ? "" : option.value.front());
  }
  po::store(known, variables);
}

template <class Value>
void store_path(const po::variables_map& variables, const char* key,
                const std::filesystem::path& base, Value& out, bool from_file) {
  if (from_file && variables.count(key) != 0 && !variables[key].defaulted()) {
    const std::filesystem::path path = variables[key].as<std::string>();
    out = path.is_absolute() || path.empty() ? path : (base / path).lexically_normal();
  }
}

std::int64_t at_least(const po::variables_map& variables, const char* key, std::int64_t least,
                      std::int64_t most) {
  const auto value = variables[key].as<std::int64_t>();
  if (value < least || value > most) {
    throw Error(Errc::usage, std::string(key) + " is " + std::to_string(value) + "; it must be " +
                                 std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

/// Keys of processes; see ProcessFlags.
void add_process_flags(po::options_description& flags) {
  const auto text = [](const char* value) {
    return po::value<std::string>()->default_value(value);
  };
  const auto number = [](std::int64_t value) {
    return po::value<std::int64_t>()->default_value(value);
  };
  flags.add_options()  //
      ("job.rank", number(-1),
       "which trainer or worker this process is (also --rank); -1: from torchrun, mpirun or srun")(
          "job.master", text(""),
          "HOST:PORT where all ranks meet; trainer 0 listens there (also --master)")(
          "job.control", text(""),
          "URLs of the workers' control endpoints, one a deployment, with commas; watch:URL where "
          "somebody else calls it (also --control)")(
          "job.listen", text("127.0.0.1:8000"),
          "HOST:PORT of worker 0's control endpoint (also --listen)")(
          "job.meet", text(""),
          "HOST:PORT where the workers of a deployment meet; worker 0 listens (also --meet)")(
          "job.init_file", text(""), "trainer 0 writes the body of the init call there")(
          "job.token", text(""),
          "shared secret, for other hosts than this one; better set M2N_TOKEN (also --token)")(
          "job.epoch", number(1), "attempt at this job; grows with every one (also --epoch)")(
          "job.slice", number(0), "most parameters in one update_weights call; 0: all")(
          "job.max_cta", number(0), "most thread blocks that a GPU transport may use; 0: any")(
          "job.change", po::value<bool>()->default_value(true),
          "weights change from round to round")(
          "job.digest", po::value<bool>()->default_value(true),
          "compare the digests of trainers and workers after every round")(
          "job.log", text("human"), "one line an event: human, json or off (also --log)")(
          "job.master_fd", number(-1), "listening socket of --master, from a launcher")(
          "job.listen_fd", number(-1), "listening socket of --listen, from a launcher")(
          "job.meet_fd", number(-1), "listening socket of --meet, from a launcher");
}

}  // namespace

po::options_description experiment_flags(Experiment& e) {
  const auto text = [](const std::string& value) {
    return po::value<std::string>()->default_value(value);
  };
  const auto path = [] { return po::value<std::string>()->default_value(""); };
  const auto number = [](std::int64_t value) {
    return po::value<std::int64_t>()->default_value(value);
  };
  po::options_description flags("Keys of an experiment, by section; each is also a flag");
  flags.add_options()  //
      ("model.problem", path(), "a problem file instead of a model (also --problem)")(
          "model.family", text(e.model_family),
          "model family, see 'm2n list', or a folder with a config.json, or such a file (also "
          "--model)")("model.config", path(),
                      "config.json with the sizes; other model.* keys are sizes")(
          "source.kind", text(e.source_kind), "how trainers hold weights (also --source)")(
          "source.ranks", number(e.source_ranks), "number of trainer ranks")(
          "source.values", text(e.values),
          "where values come from: safetensors, synthetic, hdf5; default: the model folder's "
          "weights, or else synthetic")(
          "source.path", path(),
          "file or folder of the values (their options are values.*). With a model also "
          "source.quantise, quantise_from, quantise_blocks; other source.* keys go to the source")(
          "sink.kind", text(e.sink_kind), "where workers want weights (also --sink)")(
          "sink.workers", number(e.sink_workers), "number of inference ranks")(
          "sink.tensor_parallel", number(e.tensor_parallel),
          "tensor-parallel size; 0: all workers. With a model also sink.pipeline_parallel, "
          "data_parallel, expert_parallel, engine, pipeline_layers, expert_placement, "
          "redundant_experts, expert_map; other sink.* keys go to the sink")(
          "planner.name", text(e.planner), "who plans (also --planner); others go to the planner")(
          "transport.name", path(),
          "who moves (also --transport); others go to it. Without a name: "
          "ucx in launch, trainer and worker where it is built and memory is host, else loopback")(
          "topology.file", path(), "a topology file (also --topology)")(
          "run.rounds", number(1), "weight updates (also --rounds)")(
          "run.deadline", po::value<double>()->default_value(e.deadline_seconds),
          "seconds that a phase may take (also --deadline)")(
          "run.pool_bytes", number(static_cast<std::int64_t>(e.pool_bytes)),
          "memory for full tensors on a worker; a fused parameter's are never parted")(
          "run.memory", text("host"),
          "where both sides' weights live: host, or device for GPUs (also --memory)")(
          "run.devices", text(""),
          "GPUs that ranks take in turn, e.g. 0,2; default: rank modulo their number (also "
          "--devices)")("run.verify", po::value<bool>()->default_value(e.verify),
                        "compare every destination element with the oracle")(
          "simulate.sharing", po::value<std::string>()->default_value("fair"),
          "how a simulated port serves its messages: fair (max-min), proportional (by the bytes "
          "that "
          "a pair of ranks carries in all) or in_order (one at a time)")(
          "simulate.in_flight", number(0),
          "messages that a simulated port has under way; 0: one a pair of ranks")(
          "dump.file", path(), "HDF5 file to write (also --dump)")(
          "dump.shards", po::value<bool>()->default_value(e.dump_shards),
          "also dump every rank's local tensors")(
          "dump.per_rank", po::value<bool>()->default_value(e.dump_per_rank),
          "the local tensors of each rank in a file of its own beside the dump")(
          "dump.deflate", number(e.dump_deflate),
          "1 to 9: compress with zlib; 0: leave as it is, so that parts are read at once")(
          "plugin", po::value<std::vector<std::string>>()->composing(),
          "shared library with more plug-ins; may come several times")(
          "relabel", po::bool_switch(),
          "hand the workers' parts out anew, so that fewer bytes travel")(
          "explain", po::bool_switch(),
          "plan: what every tensor does at the workers, and why, instead of a plan")(
          "json", po::bool_switch(), "one JSON object on standard output");
  add_process_flags(flags);
  return flags;
}

namespace {

SimulateOptions simulation_of(const po::variables_map& variables) {
  using Discipline = SimulateOptions::Discipline;
  static const std::map<std::string, Discipline> kSharing = {
      {"fair", Discipline::fair},
      {"in_order", Discipline::in_order},
      {"proportional", Discipline::proportional}};
  const auto& word = variables["simulate.sharing"].as<std::string>();
  const auto found = kSharing.find(word);
  if (found == kSharing.end()) {
    throw Error(Errc::usage,
                "simulate.sharing is '" + word + "'; the choices are fair, in_order, proportional");
  }
  SimulateOptions options;
  options.discipline = found->second;
  options.in_flight = static_cast<std::uint32_t>(
      at_least(variables, "simulate.in_flight", 0, std::numeric_limits<std::uint32_t>::max()));
  if (options.in_flight > 0 && options.discipline == Discipline::in_order) {
    throw Error(Errc::usage,
                "simulate.in_flight does not go with simulate.sharing=in_order, which has one "
                "message a port under way; leave one of them out");
  }
  return options;
}

}  // namespace

namespace {

ProcessFlags process_of(const po::variables_map& variables) {
  constexpr std::int64_t kInt = std::numeric_limits<int>::max();
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const auto text = [&](const char* key) { return variables[key].as<std::string>(); };
  const auto number = [&](const char* key, std::int64_t least, std::int64_t most) {
    return at_least(variables, key, least, most);
  };
  ProcessFlags out;
  out.rank = static_cast<Rank>(number("job.rank", -1, std::numeric_limits<Rank>::max()));
  out.master = text("job.master");
  std::istringstream urls(text("job.control"));
  for (std::string url; std::getline(urls, url, ',');) {
    out.control.push_back(url);
  }
  out.listen = text("job.listen");
  out.meet = text("job.meet");
  out.init_file = text("job.init_file");
  out.token = text("job.token");
  out.epoch = static_cast<std::uint64_t>(number("job.epoch", 1, kAny));
  out.slice = static_cast<std::size_t>(number("job.slice", 0, kAny));
  out.max_cta = static_cast<int>(number("job.max_cta", 0, kInt));
  out.change = variables["job.change"].as<bool>();
  out.digest = variables["job.digest"].as<bool>();
  out.log = text("job.log");
  if (out.log != "human" && out.log != "json" && out.log != "off") {
    throw Error(Errc::usage, "job.log is '" + out.log + "'; the choices are human, json, off");
  }
  out.master_fd = static_cast<int>(number("job.master_fd", -1, kInt));
  out.listen_fd = static_cast<int>(number("job.listen_fd", -1, kInt));
  out.meet_fd = static_cast<int>(number("job.meet_fd", -1, kInt));
  return out;
}

void read_memory(const po::variables_map& variables, Experiment& experiment) {
  const auto& memory = variables["run.memory"].as<std::string>();
  if (memory != "host" && memory != "device") {
    throw Error(Errc::usage, "run.memory is '" + memory + "'; the choices are host, device");
  }
  experiment.memory = memory == "host" ? MemorySpace::host : MemorySpace::device;
  const auto& devices = variables["run.devices"].as<std::string>();
  std::istringstream numbers(devices);
  for (std::string number; std::getline(numbers, number, ',');) {
    int device = -1;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), device);
    if (error != std::errc{} || end != number.data() + number.size() || device < 0) {
      throw Error(Errc::usage, "run.devices is '" + devices +
                                   "'; it must be numbers of GPUs with commas, e.g. 0,1");
    }
    experiment.devices.push_back(device);
  }
  if (!experiment.devices.empty() && experiment.memory == MemorySpace::host) {
    throw Error(Errc::usage,
                "run.devices is for weights on GPUs, and run.memory is host; give --memory device, "
                "or leave out the devices");
  }
}

}  // namespace

Experiment parse_experiment(const std::vector<std::string>& arguments) {
  Experiment experiment;
  for (const std::string& word : arguments) {
    experiment.command_line += (experiment.command_line.empty() ? "" : " ") + word;
  }
  po::options_description flags = experiment_flags(experiment);
  po::options_description all;
  all.add(flags).add_options()("experiment", po::value<std::vector<std::string>>());
  po::positional_options_description positional;
  positional.add("experiment", -1);
  po::variables_map variables;
  std::set<std::string> from_file;
  std::string problem_file;
  try {
    store(
        po::command_line_parser(normalized(arguments))
            .options(all)
            .positional(positional)
            .style(po::command_line_style::default_style & ~po::command_line_style::allow_guessing)
            .allow_unregistered()
            .run(),
        variables, experiment, "command line");
    if (variables.count("experiment") != 0) {
      const auto files = variables["experiment"].as<std::vector<std::string>>();
      if (files.size() > 1) {
        throw Error(Errc::usage, "'" + files[1] + "' is one file too many; a command takes one");
      }
      const std::string text = read_text_file(files.front());
      if (is_json(text)) {
        problem_file = files.front();
      } else {
        experiment.file = files.front();
        std::istringstream stream(text);
        const po::parsed_options parsed = po::parse_config_file(stream, flags, true);
        for (const po::option& option : parsed.options) {
          if (variables.count(option.string_key) == 0 || variables[option.string_key].defaulted()) {
            from_file.insert(option.string_key);
          }
        }
        store(parsed, variables, experiment, experiment.file.string());
      }
    }
    po::notify(variables);
  } catch (const po::error& error) {
    throw Error(Errc::usage,
                (experiment.file.empty() ? std::string("command line") : experiment.file.string()) +
                    ": " + error.what());
  }

  const std::filesystem::path base = experiment.file.parent_path();
  const auto read_path = [&](const char* key, std::filesystem::path& out) {
    out = variables[key].as<std::string>();
    store_path(variables, key, base, out, from_file.contains(key));
  };
  constexpr std::int64_t kMaxRanks = std::numeric_limits<Rank>::max();
  read_path("model.problem", experiment.problem);
  if (!problem_file.empty()) {
    if (!experiment.problem.empty()) {
      throw Error(Errc::usage, "'" + problem_file + "' and '" + experiment.problem.string() +
                                   "' are two problem files; a command takes one");
    }
    experiment.problem = problem_file;
  }
  read_path("model.config", experiment.model_config);
  read_path("source.path", experiment.values_path);
  read_path("topology.file", experiment.topology);
  read_path("dump.file", experiment.dump);
  experiment.model_family = variables["model.family"].as<std::string>();
  if (std::filesystem::path model; is_path(experiment.model_family)) {
    read_path("model.family", model);
    experiment.model_family.clear();
    experiment.model_folder = model.extension() == ".json" ? model.parent_path() : model;
    if (experiment.model_config.empty()) {
      experiment.model_config = model.extension() == ".json" ? model : model / "config.json";
    }
  }
  experiment.source_kind = variables["source.kind"].as<std::string>();
  experiment.source_ranks = static_cast<Rank>(at_least(variables, "source.ranks", 1, kMaxRanks));
  experiment.values = variables["source.values"].as<std::string>();
  experiment.sink_kind = variables["sink.kind"].as<std::string>();
  experiment.sink_workers = static_cast<Rank>(at_least(variables, "sink.workers", 1, kMaxRanks));
  experiment.tensor_parallel = at_least(variables, "sink.tensor_parallel", 0, kMaxRanks);
  experiment.planner = variables["planner.name"].as<std::string>();
  experiment.transport = variables["transport.name"].as<std::string>();
  experiment.rounds = static_cast<std::uint64_t>(
      at_least(variables, "run.rounds", 1, std::numeric_limits<std::int64_t>::max()));
  experiment.deadline_seconds = variables["run.deadline"].as<double>();
  if (!(experiment.deadline_seconds > 0 && experiment.deadline_seconds < 1e9)) {
    throw Error(Errc::usage, "run.deadline must be a positive number of seconds below 1e9");
  }
  experiment.pool_bytes = static_cast<std::uint64_t>(
      at_least(variables, "run.pool_bytes", 0, std::numeric_limits<std::int64_t>::max()));
  read_memory(variables, experiment);
  experiment.verify = variables["run.verify"].as<bool>();
  experiment.process = process_of(variables);
  experiment.simulation = simulation_of(variables);
  experiment.dump_shards = variables["dump.shards"].as<bool>();
  experiment.dump_per_rank = variables["dump.per_rank"].as<bool>();
  experiment.dump_deflate = static_cast<int>(at_least(variables, "dump.deflate", 0, 9));
  if (variables.count("plugin") != 0) {
    for (const std::string& file : variables["plugin"].as<std::vector<std::string>>()) {
      experiment.plugins.emplace_back(file);
    }
  }
  experiment.relabel = variables["relabel"].as<bool>();
  experiment.explain = variables["explain"].as<bool>();
  experiment.json = variables["json"].as<bool>();
  return experiment;
}

}  // namespace m2n::cli
