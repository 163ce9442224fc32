// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Mixtral: experts w1 (gate), w3 (up) and w2 (down).

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Heads;
using models::Rows;
using models::Sizes;
using models::Table;

std::vector<std::string> mixtral_keys() {
  std::vector<std::string> all = {"num_hidden_layers", "intermediate_size",   "num_local_experts",
                                  "vocab_size",        "tie_word_embeddings", "experts_order"};
  const auto heads = Heads::keys();
  all.insert(all.end(), heads.begin(), heads.end());
  return all;
}

Table mixtral_table(const Options& options) {
  const Sizes sizes("mixtral", options, mixtral_keys());
  sizes.choice("model_type", {"mixtral"});
  const Heads heads(sizes);
  const bool tied = sizes.flag("tie_word_embeddings", false);

  Table table = sizes.table(DType::bf16, "model.");
  table.layers = sizes.size("num_hidden_layers");
  table.experts = sizes.size("num_local_experts");
  table.ignored = {"{root}layers.{l}.self_attn.rotary_emb.inv_freq"};

  Rows rows(table);
  rows.embedding(sizes, heads.hidden, "{root}embed_tokens", tied);
  const std::string layer = "{root}layers.{l}.";
  rows.norm(layer + "input_layernorm", heads.hidden);
  rows.attention(layer + "self_attn.", heads);
  rows.norm(layer + "post_attention_layernorm", heads.hidden);
  rows.whole(layer + "block_sparse_moe.gate.weight", {table.experts, heads.hidden});
  rows.align = sizes.size_or("intermediate_align", 1);
  rows.experts(layer + "block_sparse_moe.experts", heads.hidden, sizes.units("intermediate_size"),
               {.gate = "w1", .up = "w3", .down = "w2"},
               sizes.text("experts_order", "gate_up") == "up_gate");
  rows.norm("{root}norm", heads.hidden);
  rows.head(sizes, heads.hidden, "{root}embed_tokens", tied);
  return table;
}

}  // namespace

void add_model_mixtral(Registries& registries) {
  registries.models.add("mixtral", "Mixtral: experts in every layer",
                        [](const ModelContext& context) {
                          return models::make_family(mixtral_table(context.options));
                        });
}

}  // namespace m2n
