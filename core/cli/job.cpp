// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/job.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/api/memory.hpp"
#include "core/engine/binding.hpp"
#include "core/engine/changing.hpp"
#include "core/error.hpp"
#include "core/io/json_reader.hpp"
#include "core/tensor/block_scales.hpp"

namespace m2n::cli {
namespace {

bool holds_weights(const std::filesystem::path& folder) {
  return !folder.empty() && (std::filesystem::exists(folder / "model.safetensors") ||
                             std::filesystem::exists(folder / "model.safetensors.index.json"));
}

/// Trainers that hold as @p from what the checkpoint has in blocks of f8_e4m3.
struct Quantising {
  DType from = DType::bf16;
  Dims blocks{128, 128};
};

/// "128x128". @throws Error{usage}.
Dims blocks_from_text(const std::string& text) {
  Dims blocks;
  std::istringstream in(text);
  for (std::string extent; std::getline(in, extent, 'x');) {
    const bool number = !extent.empty() && extent.size() < 10 &&
                        extent.find_first_not_of("0123456789") == std::string::npos;
    if (!number || std::stoll(extent) < 1 || blocks.size() == kMaxRank) {
      blocks = {};
      break;
    }
    blocks.push_back(std::stoll(extent));
  }
  if (blocks.empty()) {
    throw Error(Errc::usage, "source.quantise_blocks is '" + text +
                                 "'; expected the extents of a block, like 128x128");
  }
  return blocks;
}

/// Takes the keys that no source plug-in knows. @throws Error{usage}.
std::optional<Quantising> take_quantising(Options& source) {
  const auto take = [&](const char* key) {
    const auto at = source.find(key);
    std::optional<std::string> value;
    if (at != source.end()) {
      value = at->second;
      source.erase(at);
    }
    return value;
  };
  const auto to = take("quantise");
  const auto from = take("quantise_from");
  const auto blocks = take("quantise_blocks");
  if (!to) {
    if (from || blocks) {
      throw Error(Errc::usage,
                  "source.quantise_from and source.quantise_blocks say how; expected "
                  "source.quantise=f8_e4m3 as well");
    }
    return std::nullopt;
  }
  Quantising out;
  out.from = from ? dtype_from_string(*from) : out.from;
  if (!can_quantise(out.from, dtype_from_string(*to))) {
    throw Error(Errc::usage, "source.quantise is '" + *to + "' of '" +
                                 std::string(to_string(out.from)) +
                                 "'; expected f8_e4m3, of bf16, f16 or f32");
  }
  out.blocks = blocks ? blocks_from_text(*blocks) : out.blocks;
  return out;
}

/// A plan for devices needs none here.
int count_devices() {
  try {
    return memory_of(MemorySpace::device).device_count();
  } catch (const Error&) {
    return 0;
  }
}

}  // namespace

Job::Job(const Experiment& experiment, RanksAre ranks)
    : experiment_(experiment), registries_(builtin_registries()) {
  for (const std::filesystem::path& file : experiment_.plugins) {
    load_plugin(file, registries_);
  }
  if (experiment_.transport.empty()) {
    experiment_.transport = default_transport(registries_, ranks, experiment_.memory);
  }
  // Unknown names are found before anything large is read.
  if (experiment_.replay.empty()) {
    make_planner();
  }
  registries_.transports.create(experiment_.transport, {experiment_.transport_options});
  if (experiment_.memory == MemorySpace::device) {
    device_count_ = count_devices();
  }
  if (!experiment_.replay.empty()) {
    build_from_dump();
  } else if (experiment_.problem.empty()) {
    build_from_model();
  } else {
    build_from_problem();
  }
  if (!experiment_.topology.empty() || !replayed_) {
    topology_ = experiment_.topology.empty()
                    ? Topology::single_island(std::max<Rank>(1, problem_->world_size()))
                    : Topology::read(experiment_.topology);
  }
  topology_.require(problem_->world_size());
  if (experiment_.relabel) {
    apply_relabelling();
  }
}

void Job::apply_relabelling() {
  relabelling_ = relabel(*problem_, topology_);
  if (models_ == nullptr) {
    problem_ = std::make_unique<const Problem>(relabelled(*problem_, *relabelling_));
    for (std::size_t i = 0; i < problem_->parameters().size(); ++i) {
      declared_sink_[i].side = problem_->parameters()[i].destination;
    }
    resolutions_ = declared_sink_;
    return;
  }
  // A worker keeps what the part that it plays now needs.
  auto models = std::make_shared<WorkerModels>(models_->size());
  const std::vector<Rank>& ranks = problem_->destination_ranks();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto plays = static_cast<std::size_t>(relabelling_->ranks[i] - first_worker_);
    (*models)[plays] = (*models_)[static_cast<std::size_t>(ranks[i] - first_worker_)];
  }
  models_ = std::move(models);
  resolve_models();
}

void Job::declare_problem() {
  for (const Parameter& parameter : problem_->parameters()) {
    if (parameter.quantise) {
      quantised_.emplace(parameter.name, *parameter.quantise);
    }
    declared_source_.push_back({parameter.name, parameter.source_dtype(), parameter.shape,
                                parameter.source, parameter.quantise});
    declared_sink_.push_back(
        {Mode::direct, parameter.destination, parameter.cast, "declared by the problem"});
  }
  experiment_.source_kind = "declared";
  source_ranks_ = problem_->world_size();
}

Catalogue Job::declared_catalogue() const {
  Catalogue catalogue;
  for (const Parameter& parameter : problem_->parameters()) {
    catalogue.push_back({parameter.name, parameter.source_dtype(), parameter.shape});
  }
  return catalogue;
}

void Job::build_from_dump() {
  const DumpReader dump(experiment_.replay);
  problem_ = std::make_unique<const Problem>(dump.problem());
  replayed_ = dump.plan(*problem_);
  experiment_.planner = replayed_->planner;
  declare_problem();
  resolutions_ = declared_sink_;
  const std::string where = "the topology of '" + experiment_.replay.string() + "'";
  const auto topology = dump.fact("topology");
  topology_ = topology ? Topology::parse(*topology, where)
                       : Topology::single_island(std::max<Rank>(1, problem_->world_size()));
  // The values that the trainers had then: their shards, or what is made up again from names.
  const std::vector<DumpShard> shards = dump.shards(Role::source);
  const bool own_values = experiment_.values_path.empty();
  if (own_values && !shards.empty()) {
    experiment_.values = "hdf5";
    experiment_.values_path = experiment_.replay;
    experiment_.values_options.emplace("side", "source");
  }
  take_values(make_values(declared_catalogue()));
  if (own_values && (!shards.empty() || dump.fact("values") == values_->name())) {
    known_digests_ = dump.digests();
  }
}

void Job::build_from_problem() {
  problem_ = std::make_unique<const Problem>(Problem::read(experiment_.problem));
  declare_problem();
  take_values(make_values(declared_catalogue()));
  if (experiment_.sink_kind == "inplace" || problem_->destination_ranks().empty()) {
    resolutions_ = declared_sink_;
    return;
  }
  // Another sink may take the parameters in another way.
  resolutions_ = make_sink(problem_->destination_ranks().front())->resolve(declared_source_);
  problem_ = std::make_unique<const Problem>(make_problem(declared_source_, resolutions_));
}

void Job::build_from_model() {
  if (experiment_.model_family.empty() && experiment_.model_config.empty()) {
    std::string families;
    for (const auto& entry : registries_.models.entries()) {
      families += (families.empty() ? "" : ", ") + entry.first;
    }
    throw Error(
        Errc::usage,
        "no model: name an experiment file, --problem FILE, or --model with a folder that has a "
        "config.json or one of " +
            families);
  }
  Options model_options = experiment_.model;
  if (!experiment_.model_config.empty()) {
    model_options["config"] = read_text_file(experiment_.model_config);
    if (experiment_.model_family.empty()) {
      experiment_.model_family =
          model_type_of(model_options["config"], experiment_.model_config.string());
    }
  }
  if (experiment_.values.empty() && holds_weights(experiment_.model_folder)) {
    experiment_.values = "safetensors";
    experiment_.values_path = experiment_.model_folder;
  }
  const auto family = registries_.models.create(experiment_.model_family, {model_options});
  const std::optional<Quantising> quantising = take_quantising(experiment_.source);
  if (quantising) {
    quantised_ = quantised_weights(family->catalogue(), quantising->blocks);
    take_values(make_values(trained_catalogue(family->catalogue(), quantised_, quantising->from)));
  } else {
    take_values(make_values(family->catalogue()));
  }

  if (experiment_.tensor_parallel != 0) {
    experiment_.sink["tensor_parallel"] = std::to_string(experiment_.tensor_parallel);
  }
  const Deployment deployment = take_deployment(experiment_.sink, experiment_.sink_workers);
  models_ = std::make_shared<const WorkerModels>(family->workers(deployment, values_->catalogue()));
  source_ranks_ = experiment_.source_ranks;
  first_worker_ = experiment_.source_ranks;
  resolve_models();
}

void Job::resolve_models() {
  const auto source = make_source(0);
  resolutions_ = make_sink(first_worker_)->resolve(source->params());
  problem_ = std::make_unique<const Problem>(make_problem(source->params(), resolutions_));
}

Plan Job::make_plan() const {
  return replayed_ ? *replayed_ : make_planner()->plan(*problem_, topology_);
}

std::unique_ptr<Planner> Job::make_planner() const {
  return registries_.planners.create(experiment_.planner, {experiment_.planner_options});
}

std::unique_ptr<TensorValues> Job::make_values(Catalogue made_up) {
  if (experiment_.values.empty()) {
    experiment_.values = "synthetic";
  }
  Options options = experiment_.values_options;
  if (!experiment_.values_path.empty()) {
    options["path"] = experiment_.values_path.string();
  }
  return registries_.values.create(experiment_.values, {options, std::move(made_up)});
}

void Job::take_values(std::shared_ptr<const TensorValues> trained) {
  trained_ = std::move(trained);
  values_ = quantised_.empty() ? trained_ : make_quantised_values(trained_, quantised_);
}

std::unique_ptr<TensorValues> Job::changed_values(std::uint64_t version) const {
  std::unique_ptr<TensorValues> changed = make_changed_values(*trained_, version);
  return quantised_.empty() ? std::move(changed)
                            : make_quantised_values(std::move(changed), quantised_);
}

std::unique_ptr<WeightSource> Job::make_source(Rank rank, bool changes) const {
  auto source = registries_.sources.create(
      experiment_.source_kind,
      {experiment_.source, rank, source_ranks_, trained_, declared_source_, place_of(rank)});
  if (changes) {
    source = make_changing_source(std::move(source), rank);
  }
  return quantised_.empty() ? std::move(source)
                            : make_quantising_source(std::move(source), rank, quantised_);
}

std::unique_ptr<WeightSink> Job::make_sink(Rank rank) const {
  return registries_.sinks.create(experiment_.sink_kind, {experiment_.sink, rank, first_worker_,
                                                          models_, declared_sink_, place_of(rank)});
}

std::optional<int> Job::device_of(Rank rank) const {
  if (experiment_.memory == MemorySpace::host) {
    return {};
  }
  const auto at = static_cast<std::size_t>(rank);
  return experiment_.devices.empty() ? static_cast<int>(rank) % std::max(1, device_count_)
                                     : experiment_.devices[at % experiment_.devices.size()];
}

MemoryPlace Job::place_of(Rank rank) const {
  return {experiment_.memory, device_of(rank).value_or(0)};
}

void Job::require_memory() const {
  if (experiment_.memory == MemorySpace::host) {
    return;
  }
  const auto transport =
      registries_.transports.create(experiment_.transport, {experiment_.transport_options});
  if (!transport->moves(experiment_.memory)) {
    throw Error(Errc::usage, "transport '" + experiment_.transport +
                                 "' moves host memory alone, and run.memory is device; expected "
                                 "transport 'nccl', or run.memory host");
  }
  if (memory_of(MemorySpace::device).device_count() == 0) {
    throw Error(Errc::unavailable,
                "run.memory is device, and this machine has no GPU that works; expected one with "
                "its driver, or run.memory host");
  }
  for (const int device : experiment_.devices) {
    if (device >= device_count_) {
      throw Error(Errc::usage, "run.devices names GPU " + std::to_string(device) +
                                   "; this machine has " + std::to_string(device_count_) +
                                   ", counted from 0");
    }
  }
}

std::vector<LocalRank> Job::make_ranks() const {
  std::vector<LocalRank> ranks(static_cast<std::size_t>(problem_->world_size()));
  const auto source = make_source(0);
  const auto holds = [](const std::vector<Rank>& side, Rank rank) {
    return std::binary_search(side.begin(), side.end(), rank);
  };
  for (Rank rank = 0; rank < problem_->world_size(); ++rank) {
    LocalRank& parts = ranks[static_cast<std::size_t>(rank)];
    parts.transport = registries_.transports.create(
        experiment_.transport, {experiment_.transport_options, {}, device_of(rank)});
    if (holds(problem_->source_ranks(), rank)) {
      parts.source = make_source(rank);
    }
    if (holds(problem_->destination_ranks(), rank)) {
      parts.sink = make_sink(rank);
      parts.sink->resolve(source->params());
    }
  }
  return ranks;
}

Comparison verify_worker(const Job& job, Rank rank, WeightSink* sink,
                         const std::vector<LocalBuffer>& destination, const TensorValues& values) {
  if (sink == nullptr) {
    return {};
  }
  if (job.models() != nullptr) {
    if (const auto live = sink->live(); !live.empty()) {
      const auto worker = static_cast<std::size_t>(rank - job.first_worker());
      return verify_model(*(*job.models())[worker], rank, live, values);
    }
  }
  return verify_pieces(job.problem(), rank, destination, values, job.resolutions());
}

}  // namespace m2n::cli
