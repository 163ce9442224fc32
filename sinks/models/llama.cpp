// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Dense Llama, Mistral, Qwen2 and Qwen3: checkpoints as Hugging Face names them, workers as vLLM
/// arranges them.

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sinks/models/family.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Row;
using models::Sizes;
using models::Table;
using models::Units;

Table llama_table(const Options& options) {
  const Sizes sizes("llama", options,
                    {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
                     "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "torch_dtype",
                     "checkpoint_root", "worker_root", "vocab_padding", "intermediate_align"});
  const std::string type = sizes.text("model_type", "llama");
  if (type != "llama" && type != "mistral" && type != "qwen2" && type != "qwen3") {
    throw Error(Errc::bad_argument, "model_type '" + type +
                                        "' is not of the llama family; the choices are llama, "
                                        "mistral, qwen2, qwen3");
  }
  const bool output_bias = sizes.flag("attention_bias", false);
  const bool qkv_bias = output_bias || type == "qwen2";
  const bool mlp_bias = sizes.flag("mlp_bias", false);

  const Index hidden = sizes.size("hidden_size");
  const Index vocab = sizes.size("vocab_size");
  const Units heads{"num_attention_heads", sizes.size("num_attention_heads")};
  const Units kv_heads{"num_key_value_heads", sizes.size_or("num_key_value_heads", heads.count),
                       true};
  const Units inner{"intermediate_size", sizes.size("intermediate_size")};
  const Units words{"vocab_size", vocab};
  const Index head = sizes.text("head_dim", "").empty()
                         ? sizes.quotient("hidden_size", "num_attention_heads")
                         : sizes.size("head_dim");
  const Index q = checked_mul(heads.count, head);
  const Index kv = checked_mul(kv_heads.count, head);
  const Index align = sizes.size_or("intermediate_align", 1);

  Table table;
  table.family = "llama";
  table.dtype = sizes.dtype(DType::bf16);
  table.layers = sizes.size("num_hidden_layers");
  table.vocab_padding = sizes.size_or("vocab_padding", 64);
  table.checkpoint_root = sizes.text("checkpoint_root", "model.");
  table.worker_root = sizes.text("worker_root", "model.");
  table.ignored = {"{root}rotary_emb.inv_freq", "{root}layers.{l}.self_attn.rotary_emb.inv_freq"};

  const std::string layer = "{root}layers.{l}.";
  const std::string attention = layer + "self_attn.";
  const std::string mlp = layer + "mlp.";
  auto& rows = table.rows;
  const auto whole = [&rows](const std::string& name, Shape shape) {
    rows.push_back({name, Cut::whole, {{name, shape}}});
  };

  const std::string embedding = "{root}embed_tokens.weight";
  rows.push_back({embedding, Cut::vocab, {{embedding, {vocab, hidden}, words}}});
  whole(layer + "input_layernorm.weight", {hidden});
  rows.push_back({attention + "qkv_proj.weight",
                  Cut::column,
                  {{attention + "q_proj.weight", {q, hidden}, heads},
                   {attention + "k_proj.weight", {kv, hidden}, kv_heads},
                   {attention + "v_proj.weight", {kv, hidden}, kv_heads}}});
  if (qkv_bias) {
    rows.push_back({attention + "qkv_proj.bias",
                    Cut::column,
                    {{attention + "q_proj.bias", {q}, heads},
                     {attention + "k_proj.bias", {kv}, kv_heads},
                     {attention + "v_proj.bias", {kv}, kv_heads}}});
  }
  if (type == "qwen3") {
    whole(attention + "q_norm.weight", {head});
    whole(attention + "k_norm.weight", {head});
  }
  rows.push_back(
      {attention + "o_proj.weight", Cut::row, {{attention + "o_proj.weight", {hidden, q}, heads}}});
  if (output_bias) {
    whole(attention + "o_proj.bias", {hidden});
  }
  whole(layer + "post_attention_layernorm.weight", {hidden});
  rows.push_back({mlp + "gate_up_proj.weight",
                  Cut::column,
                  {{mlp + "gate_proj.weight", {inner.count, hidden}, inner},
                   {mlp + "up_proj.weight", {inner.count, hidden}, inner}},
                  align});
  if (mlp_bias) {
    rows.push_back({mlp + "gate_up_proj.bias",
                    Cut::column,
                    {{mlp + "gate_proj.bias", {inner.count}, inner},
                     {mlp + "up_proj.bias", {inner.count}, inner}},
                    align});
  }
  rows.push_back({mlp + "down_proj.weight",
                  Cut::row,
                  {{mlp + "down_proj.weight", {hidden, inner.count}, inner}},
                  align});
  if (mlp_bias) {
    whole(mlp + "down_proj.bias", {hidden});
  }
  whole("{root}norm.weight", {hidden});
  Row lm_head{"lm_head.weight", Cut::vocab, {{"lm_head.weight", {vocab, hidden}, words}}};
  if (sizes.flag("tie_word_embeddings", false)) {
    lm_head.same_as = embedding;
  }
  rows.push_back(lm_head);
  return table;
}

}  // namespace

void add_model_llama(Registries& registries) {
  registries.models.add("llama", "dense Llama, Mistral, Qwen2 and Qwen3 on tensor-parallel workers",
                        [](const ModelContext& context) {
                          return models::make_family(llama_table(context.options));
                        });
}

}  // namespace m2n
