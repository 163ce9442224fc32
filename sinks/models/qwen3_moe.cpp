// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Qwen3-MoE: every layer has experts and no shared one.

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Heads;
using models::Quantization;
using models::Rows;
using models::Sizes;
using models::Table;

std::vector<std::string> qwen3_moe_keys() {
  std::vector<std::string> all = {
      "num_hidden_layers", "moe_intermediate_size", "num_experts",  "vocab_size",
      "attention_bias",    "tie_word_embeddings",   "experts_order"};
  for (const auto& more : {Heads::keys(), Quantization::keys()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

Table qwen3_moe_table(const Options& options) {
  const Sizes sizes("qwen3_moe", options, qwen3_moe_keys());
  sizes.choice("model_type", {"qwen3_moe"});
  const Heads heads(sizes);
  const bool tied = sizes.flag("tie_word_embeddings", false);
  const bool bias = sizes.flag("attention_bias", false);
  const Quantization quantization(sizes);

  Table table = sizes.table(DType::bf16, "model.");
  table.layers = sizes.size("num_hidden_layers");
  table.experts = sizes.size("num_experts");
  table.ignored = {"{root}layers.{l}.self_attn.rotary_emb.inv_freq"};
  quantization.mark(table);

  Rows rows(table);
  rows.embedding(sizes, heads.hidden, "{root}embed_tokens", tied);
  const std::string layer = "{root}layers.{l}.";
  rows.norm(layer + "input_layernorm", heads.hidden);
  rows.scales = quantization.scales;
  rows.block = quantization.block;
  rows.attention(layer + "self_attn.", heads,
                 {.qkv_bias = bias, .output_bias = bias, .norms = true});
  rows.norm(layer + "post_attention_layernorm", heads.hidden);
  rows.whole(layer + "mlp.gate.weight", {table.experts, heads.hidden});
  rows.align = sizes.size_or("intermediate_align", 1);
  rows.experts(layer + "mlp.experts", heads.hidden, sizes.units("moe_intermediate_size"), {},
               sizes.text("experts_order", "gate_up") == "up_gate");
  rows.norm("{root}norm", heads.hidden);
  rows.head(sizes, heads.hidden, "{root}embed_tokens", tied);
  return table;
}

}  // namespace

void add_model_qwen3_moe(Registries& registries) {
  registries.models.add("qwen3_moe", "Qwen3 with experts in every layer",
                        [](const ModelContext& context) {
                          return models::make_family(qwen3_moe_table(context.options));
                        });
}

}  // namespace m2n
