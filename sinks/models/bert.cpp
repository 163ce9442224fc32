// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// BERT encoders: checkpoints as Hugging Face's BertModel names them, workers with query, key and
/// value in one parameter, and embeddings, norms and pooler on every worker.

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sinks/models/family.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Sizes;
using models::Table;
using models::Units;

Table bert_table(const Options& options) {
  const Sizes sizes(
      "bert", options,
      {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
       "vocab_size", "max_position_embeddings", "type_vocab_size", "dtype", "torch_dtype",
       "checkpoint_root", "worker_root", "intermediate_align"});
  if (const std::string type = sizes.text("model_type", "bert"); type != "bert") {
    throw Error(Errc::bad_argument,
                "model_type '" + type + "' is not of the bert family; only bert is");
  }
  const Index hidden = sizes.size("hidden_size");
  const Units heads{"num_attention_heads", sizes.size("num_attention_heads")};
  const Units inner{"intermediate_size", sizes.size("intermediate_size")};
  (void)sizes.quotient("hidden_size", "num_attention_heads");
  const Index align = sizes.size_or("intermediate_align", 1);

  Table table;
  table.family = "bert";
  table.dtype = sizes.dtype(DType::f32);
  table.layers = sizes.size("num_hidden_layers");
  table.checkpoint_root = sizes.text("checkpoint_root", "");
  table.worker_root = sizes.text("worker_root", "");
  table.ignored = {"{root}embeddings.position_ids", "{root}embeddings.token_type_ids"};

  const std::string embeddings = "{root}embeddings.";
  const std::string layer = "{root}encoder.layer.{l}.";
  const std::string attention = layer + "attention.self.";
  auto& rows = table.rows;
  const auto whole = [&rows](const std::string& name, Shape shape) {
    rows.push_back({name, Cut::whole, {{name, shape}}});
  };
  const auto norm = [&](const std::string& module) {
    whole(module + ".weight", {hidden});
    whole(module + ".bias", {hidden});
  };

  whole(embeddings + "word_embeddings.weight", {sizes.size("vocab_size"), hidden});
  whole(embeddings + "position_embeddings.weight", {sizes.size("max_position_embeddings"), hidden});
  whole(embeddings + "token_type_embeddings.weight", {sizes.size("type_vocab_size"), hidden});
  norm(embeddings + "LayerNorm");
  rows.push_back({attention + "qkv_proj.weight",
                  Cut::column,
                  {{attention + "query.weight", {hidden, hidden}, heads},
                   {attention + "key.weight", {hidden, hidden}, heads},
                   {attention + "value.weight", {hidden, hidden}, heads}}});
  rows.push_back({attention + "qkv_proj.bias",
                  Cut::column,
                  {{attention + "query.bias", {hidden}, heads},
                   {attention + "key.bias", {hidden}, heads},
                   {attention + "value.bias", {hidden}, heads}}});
  const std::string output = layer + "attention.output.dense";
  rows.push_back({output + ".weight", Cut::row, {{output + ".weight", {hidden, hidden}, heads}}});
  whole(output + ".bias", {hidden});
  norm(layer + "attention.output.LayerNorm");
  const std::string up = layer + "intermediate.dense";
  rows.push_back(
      {up + ".weight", Cut::column, {{up + ".weight", {inner.count, hidden}, inner}}, align});
  rows.push_back({up + ".bias", Cut::column, {{up + ".bias", {inner.count}, inner}}, align});
  const std::string down = layer + "output.dense";
  rows.push_back(
      {down + ".weight", Cut::row, {{down + ".weight", {hidden, inner.count}, inner}}, align});
  whole(down + ".bias", {hidden});
  norm(layer + "output.LayerNorm");
  whole("{root}pooler.dense.weight", {hidden, hidden});
  whole("{root}pooler.dense.bias", {hidden});
  return table;
}

}  // namespace

void add_model_bert(Registries& registries) {
  registries.models.add(
      "bert", "BERT encoders on tensor-parallel workers",
      [](const ModelContext& context) { return models::make_family(bert_table(context.options)); });
}

}  // namespace m2n
