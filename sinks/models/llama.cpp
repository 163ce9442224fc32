// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Dense Llama, Mistral, Qwen2 and Qwen3: checkpoints as Hugging Face names them, workers as vLLM
/// arranges them.

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::AttentionStyle;
using models::Heads;
using models::Quantization;
using models::Rows;
using models::Sizes;
using models::Table;

const std::vector<std::string> kLlamaTypes = {"llama", "mistral", "qwen2", "qwen3"};

std::vector<std::string> llama_keys() {
  std::vector<std::string> all = {"num_hidden_layers",   "intermediate_size", "vocab_size",
                                  "tie_word_embeddings", "attention_bias",    "mlp_bias"};
  for (const auto& more : {Heads::keys(), Quantization::keys()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

Table llama_table(const Options& options) {
  const Sizes sizes("llama", options, llama_keys());
  const std::string type = sizes.choice("model_type", kLlamaTypes);
  const Heads heads(sizes);
  const bool tied = sizes.flag("tie_word_embeddings", false);
  const Quantization quantization(sizes);

  Table table = sizes.table(DType::bf16, "model.");
  table.layers = sizes.size("num_hidden_layers");
  table.ignored = {"{root}rotary_emb.inv_freq", "{root}layers.{l}.self_attn.rotary_emb.inv_freq"};
  quantization.mark(table);

  Rows rows(table);
  rows.embedding(sizes, heads.hidden, "{root}embed_tokens", tied);
  const std::string layer = "{root}layers.{l}.";
  rows.norm(layer + "input_layernorm", heads.hidden);
  rows.scales = quantization.scales;
  rows.block = quantization.block;
  const bool output_bias = sizes.flag("attention_bias", false);
  rows.attention(layer + "self_attn.", heads,
                 {.qkv_bias = output_bias || type == "qwen2",
                  .output_bias = output_bias,
                  .norms = type == "qwen3"});
  rows.norm(layer + "post_attention_layernorm", heads.hidden);
  rows.align = sizes.size_or("intermediate_align", 1);
  rows.gated_mlp(layer + "mlp.", heads.hidden, sizes.units("intermediate_size"),
                 sizes.flag("mlp_bias", false));
  rows.norm("{root}norm", heads.hidden);
  rows.head(sizes, heads.hidden, "{root}embed_tokens", tied);
  return table;
}

}  // namespace

void add_model_llama(Registries& registries) {
  for (const std::string& type : kLlamaTypes) {
    registries.models.add(type, "dense decoders: llama, mistral, qwen2, qwen3",
                          [type](const ModelContext& context) {
                            Options options = context.options;
                            if (type != kLlamaTypes.front()) {
                              options["model_type"] = type;
                            }
                            return models::make_family(llama_table(options));
                          });
  }
}

}  // namespace m2n
