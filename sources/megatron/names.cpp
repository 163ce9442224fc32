// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/megatron/names.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

namespace m2n::sources::megatron {

namespace {

/// A module of a layer: what its weight and its bias are, and the module that holds it.
struct Module {
  std::string_view name;
  Kind weight;
  Kind bias;
  std::string_view fused;  ///< Empty: a parameter of its own.
};

constexpr std::array kModules = {
    Module{"self_attn.q_proj", Kind::query, Kind::query, "self_attn.linear_qkv"},
    Module{"self_attn.k_proj", Kind::key, Kind::key, "self_attn.linear_qkv"},
    Module{"self_attn.v_proj", Kind::value, Kind::value, "self_attn.linear_qkv"},
    Module{"self_attn.o_proj", Kind::row, Kind::replicated, ""},
    Module{"self_attn.q_norm", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.k_norm", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.q_a_proj", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.q_a_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.q_b_proj", Kind::column, Kind::column, ""},
    Module{"self_attn.kv_a_proj_with_mqa", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.kv_a_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"self_attn.kv_b_proj", Kind::column, Kind::column, ""},
    Module{"mlp.gate_proj", Kind::gate, Kind::gate, "mlp.linear_fc1"},
    Module{"mlp.up_proj", Kind::up, Kind::up, "mlp.linear_fc1"},
    Module{"mlp.down_proj", Kind::row, Kind::replicated, ""},
    Module{"mlp.gate", Kind::replicated, Kind::replicated, ""},
    Module{"block_sparse_moe.gate", Kind::replicated, Kind::replicated, ""},
    Module{"mlp.shared_expert.gate_proj", Kind::gate, Kind::gate, "mlp.shared_expert.linear_fc1"},
    Module{"mlp.shared_expert.up_proj", Kind::up, Kind::up, "mlp.shared_expert.linear_fc1"},
    Module{"mlp.shared_expert.down_proj", Kind::row, Kind::replicated, ""},
    Module{"mlp.shared_expert_gate", Kind::replicated, Kind::replicated, ""},
    Module{"mlp.shared_experts.gate_proj", Kind::gate, Kind::gate, "mlp.shared_experts.linear_fc1"},
    Module{"mlp.shared_experts.up_proj", Kind::up, Kind::up, "mlp.shared_experts.linear_fc1"},
    Module{"mlp.shared_experts.down_proj", Kind::row, Kind::replicated, ""},
    Module{"input_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"post_attention_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"pre_feedforward_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"post_feedforward_layernorm", Kind::replicated, Kind::replicated, ""},
    Module{"mlp.router", Kind::replicated, Kind::replicated, ""},
    // Prediction layers
    Module{"enorm", Kind::replicated, Kind::replicated, ""},
    Module{"hnorm", Kind::replicated, Kind::replicated, ""},
    Module{"eh_proj", Kind::column, Kind::column, ""},
    Module{"shared_head.norm", Kind::replicated, Kind::replicated, ""},
    Module{"shared_head.head", Kind::head, Kind::head, ""},
    Module{"embed_tokens", Kind::embedding, Kind::embedding, ""},
    // BERT
    Module{"attention.self.query", Kind::query, Kind::query, "attention.linear_qkv"},
    Module{"attention.self.key", Kind::key, Kind::key, "attention.linear_qkv"},
    Module{"attention.self.value", Kind::value, Kind::value, "attention.linear_qkv"},
    Module{"attention.output.dense", Kind::row, Kind::replicated, ""},
    Module{"attention.output.LayerNorm", Kind::replicated, Kind::replicated, ""},
    Module{"intermediate.dense", Kind::column, Kind::column, ""},
    Module{"output.dense", Kind::row, Kind::replicated, ""},
    Module{"output.LayerNorm", Kind::replicated, Kind::replicated, ""},
    // GPT-2
    Module{"ln_1", Kind::replicated, Kind::replicated, ""},
    Module{"ln_2", Kind::replicated, Kind::replicated, ""},
    Module{"attn.c_attn", Kind::conv_qkv, Kind::conv_qkv, "attn.linear_qkv"},
    Module{"attn.c_proj", Kind::conv_row, Kind::replicated, ""},
    Module{"mlp.c_fc", Kind::conv_column, Kind::conv_column, ""},
    Module{"mlp.c_proj", Kind::conv_row, Kind::replicated, ""},
};

/// Below "...experts.<e>.".
constexpr std::array kExpertModules = {
    Module{"gate_proj", Kind::gate, Kind::gate, "linear_fc1"},
    Module{"up_proj", Kind::up, Kind::up, "linear_fc1"},
    Module{"down_proj", Kind::row, Kind::replicated, ""},
    Module{"w1", Kind::gate, Kind::gate, "linear_fc1"},
    Module{"w3", Kind::up, Kind::up, "linear_fc1"},
    Module{"w2", Kind::row, Kind::replicated, ""},
};

struct Stacked {
  std::string_view name;
  Kind kind;
};

/// Below "...experts.", without a number: gpt-oss, plain or as mxfp4.
constexpr std::array kStacked = {
    Stacked{"gate_up_proj", Kind::stacked_conv_rows},
    Stacked{"gate_up_proj_bias", Kind::stacked_rows},
    Stacked{"gate_up_proj_blocks", Kind::stacked_rows},
    Stacked{"gate_up_proj_scales", Kind::stacked_rows},
    Stacked{"down_proj", Kind::stacked_conv_columns},
    Stacked{"down_proj_bias", Kind::stacked},
    Stacked{"down_proj_blocks", Kind::stacked_columns},
    Stacked{"down_proj_scales", Kind::stacked_columns},
};

struct Outside {
  std::string_view name;
  Kind kind;
  Place place;
};

/// Outside the layers, behind the model's prefix.
constexpr std::array kOutside = {
    Outside{"embed_tokens.weight", Kind::embedding, Place::first_stage},
    Outside{"wte.weight", Kind::embedding, Place::first_stage},
    Outside{"wpe.weight", Kind::replicated, Place::first_stage},
    Outside{"embeddings.word_embeddings.weight", Kind::embedding, Place::first_stage},
    Outside{"embeddings.position_embeddings.weight", Kind::replicated, Place::first_stage},
    Outside{"embeddings.token_type_embeddings.weight", Kind::replicated, Place::first_stage},
    Outside{"embeddings.LayerNorm.weight", Kind::replicated, Place::first_stage},
    Outside{"embeddings.LayerNorm.bias", Kind::replicated, Place::first_stage},
    Outside{"pooler.dense.weight", Kind::replicated, Place::last_stage},
    Outside{"pooler.dense.bias", Kind::replicated, Place::last_stage},
    Outside{"norm.weight", Kind::replicated, Place::last_stage},
    Outside{"norm.bias", Kind::replicated, Place::last_stage},
    Outside{"ln_f.weight", Kind::replicated, Place::last_stage},
    Outside{"ln_f.bias", Kind::replicated, Place::last_stage},
    Outside{"lm_head.weight", Kind::head, Place::last_stage},
};

constexpr std::array<std::string_view, 6> kPrefixes = {
    "model.language_model.", "language_model.model.", "model.", "transformer.", "bert.", ""};
/// Megatron keeps these as they are, on every rank of the first stage.
constexpr std::array<std::string_view, 4> kVision = {"vision_tower.", "multi_modal_projector.",
                                                     "model.vision_tower.",
                                                     "model.multi_modal_projector."};
constexpr std::array<std::string_view, 3> kLayerLists = {"layers.", "h.", "encoder.layer."};
constexpr std::array<std::string_view, 2> kExpertLists = {"mlp.experts.",
                                                          "block_sparse_moe.experts."};

/// "<number>." at the start of @p text; what follows is left in @p text.
std::optional<Index> take_number(std::string_view& text) {
  Index number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, code] = std::from_chars(text.data(), last, number);
  if (code != std::errc() || end == last || *end != '.' || number < 0) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return number;
}

/// The layer's number; what follows it is left in @p text.
std::optional<Index> take_layer(std::string_view& text) {
  for (const auto prefix : kPrefixes) {
    if (!text.starts_with(prefix)) {
      continue;
    }
    for (const auto list : kLayerLists) {
      std::string_view rest = text.substr(prefix.size());
      if (rest.starts_with(list)) {
        rest.remove_prefix(list.size());
        if (const auto layer = take_number(rest)) {
          text = rest;
          return layer;
        }
      }
    }
  }
  return std::nullopt;
}

template <std::size_t N>
const Module* find_module(const std::array<Module, N>& modules, std::string_view name) {
  for (const auto& module : modules) {
    if (module.name == name) {
      return &module;
    }
  }
  return nullptr;
}

}  // namespace

void LayerKinds::add(const std::string& name) {
  std::string_view rest = name;
  if (!take_layer(rest)) {
    return;
  }
  const std::string prefix = name.substr(0, name.size() - rest.size());
  if (rest == "self_attn.kv_b_proj.weight") {
    mla.insert(prefix);
  } else if (rest == "eh_proj.weight") {
    prediction.insert(prefix);
  }
}

namespace {

std::optional<Holding> outside_layers(const std::string& name) {
  Holding holding;
  holding.buffer = name;
  const std::string_view rest = name;
  if (std::any_of(kVision.begin(), kVision.end(),
                  [&](std::string_view prefix) { return rest.starts_with(prefix); })) {
    holding.place = Place::first_stage;
    return holding;
  }
  for (const auto& outside : kOutside) {
    for (const auto prefix : kPrefixes) {
      if (rest.starts_with(prefix) && rest.substr(prefix.size()) == outside.name) {
        holding.kind = outside.kind;
        holding.place = outside.place;
        return holding;
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Holding> holding_of(const std::string& name, const LayerKinds& layers) {
  std::string_view rest = name;
  const auto layer = take_layer(rest);
  if (!layer) {
    return outside_layers(name);
  }
  std::string prefix = name.substr(0, name.size() - rest.size());
  Holding holding;
  holding.buffer = name;
  holding.layer = *layer;
  const bool prediction = layers.prediction.contains(prefix);
  holding.place = prediction ? Place::last_stage : Place::layer;
  if (rest == "mlp.gate.e_score_correction_bias") {
    return holding;
  }
  if (rest == "self_attn.sinks") {
    holding.kind = Kind::column;
    return holding;
  }
  const bool mla = layers.mla.contains(prefix);
  for (const auto list : kExpertLists) {
    if (rest.starts_with(list)) {
      std::string_view inside = rest.substr(list.size());
      for (const Stacked& stacked : kStacked) {
        if (inside == stacked.name) {
          holding.kind = stacked.kind;
          return holding;
        }
      }
      holding.expert = take_number(inside);
      if (!holding.expert) {
        return std::nullopt;
      }
      rest = inside;
      prefix = name.substr(0, name.size() - rest.size());
    }
  }
  const auto dot = rest.rfind('.');
  const std::string_view leaf = dot == std::string_view::npos ? "" : rest.substr(dot + 1);
  const std::string_view path = rest.substr(0, dot == std::string_view::npos ? 0 : dot);
  const Module* module =
      holding.expert ? find_module(kExpertModules, path) : find_module(kModules, path);
  if (module == nullptr) {
    return std::nullopt;
  }
  const bool ends = module->weight == Kind::embedding || module->weight == Kind::head;
  if (ends && !prediction) {
    return std::nullopt;
  }
  if (leaf == "weight_scale" || leaf == "input_scale") {  // one number a tensor
    return holding;
  }
  constexpr std::string_view kBlockScales = "_scale_inv";
  if (leaf == "weight_scale_inv") {
    holding.weight = name.substr(0, name.size() - kBlockScales.size());
  } else if (leaf != "weight" && leaf != "bias") {
    return std::nullopt;
  }
  holding.kind = leaf == "bias" ? module->bias : module->weight;
  if (mla && holding.kind == Kind::query) {
    holding.kind = Kind::column;
    return holding;
  }
  if (!module->fused.empty()) {
    holding.buffer = prefix + std::string(module->fused) + "." + std::string(leaf);
  }
  return holding;
}

}  // namespace m2n::sources::megatron
