// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/bench_workloads.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "core/cli/bench_models.hpp"
#include "core/error.hpp"
#include "core/io/json_reader.hpp"
#include "core/plan/quantise.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

const std::vector<std::string> kModels = {"llama-3.1-8b", "llama-3.1-70b", "qwen3-8b",
                                          "qwen3-32b",    "qwen3-30b-a3b", "qwen3-235b-a22b",
                                          "deepseek-v3"};
const std::vector<std::string> kSweep = {"10000x4KiB", "2000x64KiB", "1000x1MiB",
                                         "200x16MiB",  "20x256MiB",  "4x1GiB"};
const std::vector<std::string> kLayouts = {
    "200x16MiB:rows",        "200x16MiB:columns",
    "200x16MiB:cross",       "200x16MiB:replicated_sources",
    "32x64MiB:slices-512",   "200x16MiB:replicated_destinations",
    "32x64MiB:slices-16384", "64x64MiB:cast"};

/// Models above this are scaled to fit unless told otherwise.
constexpr std::uint64_t kLargeBytes = 400'000'000'000;

[[noreturn]] void refuse(const std::string& name) {
  std::string models;
  for (const PublishedModel& model : published_models()) {
    models += (models.empty() ? "" : ", ") + std::string(model.name);
  }
  throw Error(
      Errc::usage,
      "no workload '" + name +
          "'; expected COUNTxSIZE[:LAYOUT] (1000x1MiB:columns; layouts are rows, columns, "
          "cross, replicated_sources, replicated_destinations, slices-BYTES, cast, quantised), "
          "models, sweep, layouts, all, a config.json, or a model: " +
          models);
}

// Equal tensors.

struct EqualTensors {
  Index count = 0;
  Index bytes = 0;  ///< Of a tensor at its destination.
  std::string layout = "rows";
  Index row_bytes = 0;  ///< Of slices.
};

std::optional<Index> positive(std::string_view text) {
  Index value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc{} && end == text.data() + text.size();
  return whole && value > 0 ? std::optional<Index>(value) : std::nullopt;
}

/// "64KiB". At most 2^50, so that a few can be added up.
std::optional<Index> size_in_bytes(std::string_view text) {
  static constexpr std::pair<std::string_view, int> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"B", 0}};
  for (const auto& [unit, shift] : kUnits) {
    if (text.ends_with(unit)) {
      const auto value = positive(text.substr(0, text.size() - unit.size()));
      constexpr Index kMost = Index{1} << 50;
      return value && *value <= (kMost >> shift) ? std::optional<Index>(*value << shift)
                                                 : std::nullopt;
    }
  }
  return {};
}

std::optional<EqualTensors> equal_tensors_of(const std::string& name) {
  const std::size_t colon = name.find(':');
  const std::string_view sizes = std::string_view(name).substr(0, colon);
  const std::size_t times = sizes.find('x');
  if (times == sizes.npos) {
    return {};
  }
  const auto count = positive(sizes.substr(0, times));
  const auto bytes = size_in_bytes(sizes.substr(times + 1));
  constexpr Index kMostTensors = 10'000'000;
  if (!count || !bytes || *count > kMostTensors || *bytes % 2 != 0) {
    return {};
  }
  EqualTensors out{*count, *bytes};
  if (colon == name.npos) {
    return out;
  }
  out.layout = name.substr(colon + 1);
  if (out.layout.starts_with("slices-")) {
    const auto row = positive(std::string_view(out.layout).substr(7));
    if (!row || *row % 2 != 0 || *bytes % *row != 0) {
      return {};
    }
    out.row_bytes = *row;
    out.layout = "slices";
    return out;
  }
  for (const char* layout : {"rows", "columns", "cross", "replicated_sources",
                             "replicated_destinations", "cast", "quantised"}) {
    if (out.layout == layout) {
      return out;
    }
  }
  return {};
}

/// Blocks of 128 x 128 under scales that every worker has.
void add_scales(std::vector<Parameter>& parameters, const Mesh& workers) {
  const Dims blocks{128, 128};
  const Layout& source = *parameters.front().source.layout;
  const auto from = std::make_shared<const Layout>(scales_layout(source, blocks));
  const auto to = std::make_shared<const Layout>(
      Layout::sharded(from->shape(), DType::f32, workers, {Placement::replicate()}));
  const std::size_t weights = parameters.size();
  for (std::size_t i = 0; i < weights; ++i) {
    const std::string scales = parameters[i].name + "_scale_inv";
    parameters[i].quantise = Quantise{blocks, scales};
    parameters.push_back({scales, from->shape(), {from, {scales}}, {to, {scales}}, false, {}});
  }
}

Workload equal_workload(const std::string& name, EqualTensors w, const WorkloadContext& context) {
  Workload out{name, {}, {}};
  if (context.scale > 0 && context.scale < 1) {
    const auto all = w.count;
    w.count = std::max<Index>(1, std::llround(static_cast<double>(all) * context.scale));
    out.scaled = std::to_string(w.count) + " of " + std::to_string(all) + " tensors";
  }
  const Mesh trainers({context.trainers}, 0);
  const Mesh workers({context.workers}, context.first_worker);
  const DType dtype = DType::bf16;
  const Index elements = w.bytes / 2;
  // As square as powers of two allow, so that both dimensions can be cut; rows of at most 8 KiB.
  Index columns = 1;
  while (columns < 4096 && columns * columns * 2 <= elements && elements % (columns * 2) == 0) {
    columns *= 2;
  }
  Shape shape{elements / columns, columns};
  Placement from = Placement::shard(0);
  Placement to = Placement::shard(0);
  if (w.layout == "columns") {
    from = to = Placement::shard(1);
  } else if (w.layout == "cross") {
    to = Placement::shard(1);
  } else if (w.layout == "replicated_sources") {
    from = Placement::replicate();
  } else if (w.layout == "replicated_destinations") {
    to = Placement::replicate();
  }
  std::shared_ptr<const Layout> destination;
  if (w.layout == "slices") {
    const Index width = w.row_bytes / 2;
    shape = {w.bytes / w.row_bytes, checked_mul(Index{4} * context.workers, width)};
    std::vector<RankPiece> pieces;
    for (Rank worker = 0; worker < context.workers; ++worker) {
      const Index first = (context.workers + worker) * width;
      pieces.push_back({context.first_worker + worker,
                        {{{0, first}, {shape[0], first + width}}, {0, 0, {width, 1}}}});
    }
    destination = std::make_shared<const Layout>(
        Layout::explicit_pieces(shape, dtype, workers.ranks(), std::move(pieces)));
  } else {
    destination = std::make_shared<const Layout>(
        Layout::sharded(shape, w.layout == "quantised" ? DType::f8_e4m3 : dtype, workers, {to}));
  }
  const bool cast = w.layout == "cast";
  const auto source = std::make_shared<const Layout>(
      Layout::sharded(shape, cast ? DType::f32 : dtype, trainers, {from}));
  std::vector<Parameter> parameters;
  for (Index i = 0; i < w.count; ++i) {
    const std::string tensor = "t" + std::to_string(i);
    parameters.push_back({tensor, shape, {source, {tensor}}, {destination, {tensor}}, cast, {}});
  }
  if (w.layout == "quantised") {
    add_scales(parameters, workers);
  }
  out.problem = std::make_unique<const Problem>(Problem::make(std::move(parameters)));
  return out;
}

// Models.

/// Where a config says how many layers there are: the key, and the number.
std::pair<std::string, Index> layers_of(const std::string& config, const std::string& where) {
  const json::object document = json::parse(config).as_object();
  const json::object* sizes = &document;
  if (const auto* text = document.if_contains("text_config"); text != nullptr) {
    sizes = &text->as_object();
  }
  for (const char* key : {"num_hidden_layers", "n_layer"}) {
    if (const auto* value = sizes->if_contains(key); value != nullptr && value->is_int64()) {
      return {key, value->as_int64()};
    }
  }
  throw Error(Errc::bad_argument, where + " says nothing of num_hidden_layers or n_layer");
}

/// The boxes of each checkpoint tensor that each worker needs.
using Needs = std::map<std::string, std::vector<std::vector<Box>>, std::less<>>;

Needs needs_of(const ModelFamily& family, Rank workers) {
  Needs out;
  Deployment deployment;
  deployment.workers = workers;
  deployment.tensor_parallel = workers;
  for (Rank worker = 0; worker < workers; ++worker) {
    const WorkerModel model = family.worker(deployment, worker, family.catalogue());
    for (const WorkerParameter& parameter : model.parameters) {
      if (!parameter.same_as.empty()) {
        continue;  // lands where its twin does
      }
      for (const Section& section : parameter.sections) {
        auto& boxes = out[section.tensor];
        boxes.resize(static_cast<std::size_t>(workers));
        auto& mine = boxes[static_cast<std::size_t>(worker)];
        if (std::find(mine.begin(), mine.end(), section.box) == mine.end()) {
          mine.push_back(section.box);
        }
      }
    }
  }
  return out;
}

/// One box instead of several that fill it.
void join(std::vector<Box>& boxes) {
  if (boxes.size() < 2) {
    return;
  }
  Box around = boxes.front();
  Index volume = 0;
  for (const Box& box : boxes) {
    volume += box.volume();
    for (std::size_t d = 0; d < box.rank(); ++d) {
      around.lo[d] = std::min(around.lo[d], box.lo[d]);
      around.hi[d] = std::max(around.hi[d], box.hi[d]);
    }
  }
  std::sort(boxes.begin(), boxes.end());
  for (std::size_t i = 1; i < boxes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (intersect(boxes[i], boxes[j])) {
        return;
      }
    }
  }
  if (volume == around.volume()) {
    boxes = {around};
  }
}

/// Each box compact in a buffer of its own; as a mesh says it where one can.
Side destination_of(const TensorInfo& tensor, std::vector<std::vector<Box>> boxes,
                    const WorkloadContext& context, LayoutTable& layouts) {
  std::vector<Rank> ranks(boxes.size());
  std::iota(ranks.begin(), ranks.end(), context.first_worker);
  std::vector<RankPiece> pieces;
  for (std::size_t worker = 0; worker < boxes.size(); ++worker) {
    join(boxes[worker]);
    std::uint32_t slot = 0;
    for (const Box& box : boxes[worker]) {
      if (!box.empty()) {
        pieces.push_back({ranks[worker], {box, {slot++, 0, row_major(box.extents())}}});
      }
    }
  }
  Layout layout = Layout::explicit_pieces(tensor.shape, tensor.dtype, ranks, pieces);
  std::vector<Placement> candidates = {Placement::replicate()};
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    candidates.push_back(Placement::shard(static_cast<int>(d)));
  }
  for (const Placement& placement : candidates) {
    Layout mesh = Layout::sharded(tensor.shape, tensor.dtype,
                                  Mesh({context.workers}, context.first_worker), {placement});
    if (std::equal(mesh.pieces().begin(), mesh.pieces().end(), layout.pieces().begin(),
                   layout.pieces().end())) {
      layout = std::move(mesh);
      break;
    }
  }
  std::vector<std::string> names;
  for (std::uint32_t slot = 0; slot < layout.slot_count(); ++slot) {
    names.push_back(slot == 0 ? tensor.name : tensor.name + "#" + std::to_string(slot));
  }
  return {layouts.intern(std::move(layout)), std::move(names)};
}

std::unique_ptr<const Problem> model_problem(const ModelFamily& family,
                                             const WorkloadContext& context) {
  const std::shared_ptr<const TensorValues> values =
      context.registries.values.create("synthetic", {{}, family.catalogue()});
  const auto source = context.registries.sources.create(
      "fsdp", {{{"version", "2"}}, 0, context.trainers, values, {}});
  const Needs needs = needs_of(family, context.workers);
  LayoutTable layouts;
  std::vector<Parameter> parameters;
  for (const ParamSpec& param : source->params()) {
    const auto found = needs.find(param.name);
    if (found != needs.end()) {  // no worker needs the others
      parameters.push_back(
          {param.name, param.shape, param.side,
           destination_of({param.name, param.dtype, param.shape}, found->second, context, layouts),
           false});
    }
  }
  return std::make_unique<const Problem>(Problem::make(std::move(parameters)));
}

std::uint64_t bytes_of_all(const Catalogue& catalogue) {
  std::uint64_t sum = 0;
  for (const TensorInfo& tensor : catalogue) {
    sum += static_cast<std::uint64_t>(element_count(tensor.shape)) * bytes_of(tensor.dtype);
  }
  return sum;
}

Workload model_workload(const std::string& name, const std::string& config,
                        const WorkloadContext& context) {
  const std::string type = model_type_of(config, name);
  const auto [key, all] = layers_of(config, name);
  const auto family_of = [&, &layers_key = key](Index layers) {
    return context.registries.models.create(
        type, {{{"config", config}, {layers_key, std::to_string(layers)}}});
  };
  const auto problem_of = [&](Index layers) { return model_problem(*family_of(layers), context); };
  Index layers = all;
  std::unique_ptr<const Problem> problem;
  if (context.scale > 0) {
    layers = std::max<Index>(1, std::llround(static_cast<double>(all) * context.scale));
  } else if (bytes_of_all(family_of(all)->catalogue()) > kLargeBytes) {
    Index low = 1;  // is taken, fits or not: the row then says why it does not
    Index high = all + 1;
    while (high - low > 1) {
      const Index middle = low + (high - low) / 2;
      auto candidate = problem_of(middle);
      if (context.fits(*candidate)) {
        low = middle;
        problem = std::move(candidate);
      } else {
        high = middle;
      }
    }
    layers = low;
  }
  if (problem == nullptr) {
    problem = problem_of(layers);
  }
  const std::string scaled =
      layers == all ? "" : std::to_string(layers) + " of " + std::to_string(all) + " layers";
  return {name, scaled, std::move(problem)};
}

std::optional<std::string> config_of(const std::string& name) {
  for (const PublishedModel& model : published_models()) {
    if (model.name == name) {
      return std::string(model.config);
    }
  }
  return name.ends_with(".json") ? std::optional(read_text_file(name)) : std::nullopt;
}

}  // namespace

std::vector<std::string> workload_names(const std::string& name) {
  if (name == "models") {
    return kModels;
  }
  if (name == "sweep") {
    return kSweep;
  }
  if (name == "layouts") {
    return kLayouts;
  }
  if (name == "all") {
    std::vector<std::string> out = kModels;
    out.insert(out.end(), kSweep.begin(), kSweep.end());
    out.insert(out.end(), kLayouts.begin(), kLayouts.end());
    return out;
  }
  if (!equal_tensors_of(name) && !config_of(name)) {
    refuse(name);
  }
  return {name};
}

Workload make_workload(const std::string& name, const WorkloadContext& context) {
  if (const auto equal = equal_tensors_of(name)) {
    return equal_workload(name, *equal, context);
  }
  return model_workload(name, config_of(name).value(), context);
}

}  // namespace m2n::cli
