// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/catalogues.hpp"

#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "core/api/builtin.hpp"
#include "core/io/json_reader.hpp"

namespace m2n::testing {
namespace {

bool ends_with_part(std::string_view name, std::string_view part) {
  return name.find(part) != std::string_view::npos;
}

/// The dimension that tensor parallelism cuts, or -1 for a replicated tensor.
int worker_dim(std::string_view name) {
  for (const std::string_view rows :
       {"gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head", "head.weight",
        "q_proj", "k_proj", "v_proj"}) {
    if (ends_with_part(name, rows)) {
      return 0;
    }
  }
  for (const std::string_view columns : {"down_proj", "o_proj"}) {
    if (ends_with_part(name, columns)) {
      return 1;
    }
  }
  return -1;
}

/// The expert's number in the name, or -1.
Index expert_of(std::string_view name) {
  constexpr std::string_view kKey = ".experts.";
  const std::size_t at = name.find(kKey);
  if (at == std::string_view::npos) {
    return -1;
  }
  Index expert = -1;
  const char* begin = name.data() + at + kKey.size();
  (void)std::from_chars(begin, name.data() + name.size(), expert);
  return expert;
}

}  // namespace

std::unique_ptr<ModelFamily> published_model(const std::string& model, Options options) {
  options["config"] = read_text_file(std::string(M2N_MODELS) + "/" + model + ".json");
  return builtin_registries().models.create(model_type_of(options["config"], model), {options});
}

Catalogue deepseek_v3() { return published_model("deepseek-v3")->catalogue(); }

Catalogue deepseek_v3_with_experts(Index experts) {
  return published_model("deepseek-v3", {{"n_routed_experts", std::to_string(experts)}})
      ->catalogue();
}

Catalogue kimi_k2() { return published_model("kimi-k2")->catalogue(); }

Catalogue qwen3_235b() { return published_model("qwen3-235b-a22b")->catalogue(); }

Problem sharded_problem(const Catalogue& catalogue, const Deployment& d) {
  Index experts = 1;
  for (const TensorInfo& tensor : catalogue) {
    experts = std::max(experts, expert_of(tensor.name) + 1);
  }
  const Mesh trainers({d.trainers}, 0);
  const Mesh workers({d.workers / d.tensor_parallel, d.tensor_parallel}, d.trainers);
  // Layouts are made once for each distinct use, so that 10^5 parameters share a few hundred.
  LayoutTable table;
  std::map<std::tuple<std::vector<Index>, DType, Index, bool>, std::shared_ptr<const Layout>> made;
  const auto layout = [&](const TensorInfo& tensor, Index key, bool source, auto make) {
    auto& entry = made[{{tensor.shape.begin(), tensor.shape.end()}, tensor.dtype, key, source}];
    if (!entry) {
      entry = table.intern(make());
    }
    return entry;
  };
  std::vector<Parameter> parameters;
  parameters.reserve(catalogue.size());
  for (const TensorInfo& tensor : catalogue) {
    const Index expert = expert_of(tensor.name);
    const Index group = expert < 0 ? -1 : expert * d.expert_parallel / experts;
    const int dim = worker_dim(tensor.name);
    Parameter parameter;
    parameter.name = tensor.name;
    parameter.shape = tensor.shape;
    parameter.source.layout = layout(tensor, group, true, [&] {
      if (group < 0) {
        return Layout::sharded(tensor.shape, tensor.dtype, trainers, {Placement::shard(0)});
      }
      std::vector<Rank> ranks;  // mesh (replica, expert parallel), row-major
      for (Rank rank = static_cast<Rank>(group); rank < d.trainers; rank += d.expert_parallel) {
        ranks.push_back(rank);
      }
      const auto count = static_cast<Index>(ranks.size());
      return Layout::sharded(tensor.shape, tensor.dtype, Mesh({count}, std::move(ranks)),
                             {Placement::replicate()});
    });
    parameter.destination.layout = layout(tensor, dim, false, [&] {
      return Layout::sharded(
          tensor.shape, tensor.dtype, workers,
          {Placement::replicate(), dim < 0 ? Placement::replicate() : Placement::shard(dim)});
    });
    parameter.source.buffers = {tensor.name};
    parameter.destination.buffers = {tensor.name};
    parameters.push_back(std::move(parameter));
  }
  return Problem::make(std::move(parameters));
}

}  // namespace m2n::testing
