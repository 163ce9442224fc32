// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/catalogues.hpp"

#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace m2n::testing {
namespace {

class Builder {
 public:
  explicit Builder(bool quantised) : quantised_(quantised) {}

  void add(const std::string& name, Shape shape, DType dtype = DType::bf16) {
    catalogue_.push_back({name, dtype, shape});
  }
  /// A matrix in 128 x 128 blocks of f8_e4m3 with one f32 scale each, or plain bf16.
  void matrix(const std::string& name, Index rows, Index columns) {
    if (!quantised_) {
      add(name + ".weight", {rows, columns});
      return;
    }
    add(name + ".weight", {rows, columns}, DType::f8_e4m3);
    add(name + ".weight_scale_inv", {ceil_div(rows, 128), ceil_div(columns, 128)}, DType::f32);
  }
  void mlp(const std::string& prefix, Index hidden, Index intermediate) {
    matrix(prefix + "gate_proj", intermediate, hidden);
    matrix(prefix + "up_proj", intermediate, hidden);
    matrix(prefix + "down_proj", hidden, intermediate);
  }
  Catalogue take() { return std::move(catalogue_); }

 private:
  bool quantised_;
  Catalogue catalogue_;
};

struct MlaModel {
  Index layers = 0;  // of the main model
  Index dense_layers = 0;
  Index heads = 0;
  Index experts = 0;
  Index vocabulary = 0;
  bool mtp = false;       // one more layer with its own copies of embedding and head
  bool inv_freq = false;  // a stray buffer
};

Catalogue mla_catalogue(const MlaModel& m) {
  constexpr Index kHidden = 7168;
  constexpr Index kQueryRank = 1536;
  constexpr Index kKeyRank = 512;
  constexpr Index kNope = 128;
  constexpr Index kRope = 64;
  constexpr Index kValue = 128;
  constexpr Index kIntermediate = 18432;
  constexpr Index kExpert = 2048;
  Builder b(true);
  b.add("model.embed_tokens.weight", {m.vocabulary, kHidden});
  for (Index l = 0; l < m.layers + (m.mtp ? 1 : 0); ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    b.add(layer + "input_layernorm.weight", {kHidden});
    b.add(layer + "post_attention_layernorm.weight", {kHidden});
    const std::string attention = layer + "self_attn.";
    b.matrix(attention + "q_a_proj", kQueryRank, kHidden);
    b.add(attention + "q_a_layernorm.weight", {kQueryRank});
    b.matrix(attention + "q_b_proj", m.heads * (kNope + kRope), kQueryRank);
    b.matrix(attention + "kv_a_proj_with_mqa", kKeyRank + kRope, kHidden);
    b.add(attention + "kv_a_layernorm.weight", {kKeyRank});
    b.matrix(attention + "kv_b_proj", m.heads * (kNope + kValue), kKeyRank);
    b.matrix(attention + "o_proj", kHidden, m.heads * kValue);
    if (m.inv_freq) {
      b.add(attention + "rotary_emb.inv_freq", {kHidden / 64 / 2});
    }
    if (l < m.dense_layers) {
      b.mlp(layer + "mlp.", kHidden, kIntermediate);
    } else {
      b.add(layer + "mlp.gate.weight", {m.experts, kHidden});
      b.add(layer + "mlp.gate.e_score_correction_bias", {m.experts}, DType::f32);
      for (Index e = 0; e < m.experts; ++e) {
        b.mlp(layer + "mlp.experts." + std::to_string(e) + ".", kHidden, kExpert);
      }
      b.mlp(layer + "mlp.shared_experts.", kHidden, kExpert);
    }
    if (l == m.layers) {
      b.add(layer + "embed_tokens.weight", {m.vocabulary, kHidden});
      b.add(layer + "shared_head.head.weight", {m.vocabulary, kHidden});
      b.add(layer + "shared_head.norm.weight", {kHidden});
      b.add(layer + "enorm.weight", {kHidden});
      b.add(layer + "hnorm.weight", {kHidden});
      b.add(layer + "eh_proj.weight", {kHidden, 2 * kHidden});
    }
  }
  b.add("model.norm.weight", {kHidden});
  b.add("lm_head.weight", {m.vocabulary, kHidden});
  return b.take();
}

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

Catalogue deepseek_v3() { return deepseek_v3_with_experts(256); }

Catalogue deepseek_v3_with_experts(Index experts) {
  return mla_catalogue({61, 3, 128, experts, 129280, true, false});
}

Catalogue kimi_k2() { return mla_catalogue({61, 1, 64, 384, 163840, false, true}); }

Catalogue qwen3_235b() {
  constexpr Index kHidden = 4096;
  constexpr Index kHead = 128;
  Builder b(false);
  b.add("model.embed_tokens.weight", {151936, kHidden});
  for (Index l = 0; l < 94; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    b.add(layer + "input_layernorm.weight", {kHidden});
    b.add(layer + "post_attention_layernorm.weight", {kHidden});
    b.matrix(layer + "self_attn.q_proj", 64 * kHead, kHidden);
    b.matrix(layer + "self_attn.k_proj", 4 * kHead, kHidden);
    b.matrix(layer + "self_attn.v_proj", 4 * kHead, kHidden);
    b.matrix(layer + "self_attn.o_proj", kHidden, 64 * kHead);
    b.add(layer + "self_attn.q_norm.weight", {kHead});
    b.add(layer + "self_attn.k_norm.weight", {kHead});
    b.add(layer + "mlp.gate.weight", {128, kHidden});
    for (Index e = 0; e < 128; ++e) {
      b.mlp(layer + "mlp.experts." + std::to_string(e) + ".", kHidden, 1536);
    }
  }
  b.add("model.norm.weight", {kHidden});
  b.add("lm_head.weight", {151936, kHidden});
  return b.take();
}

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
