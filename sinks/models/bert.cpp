// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// BERT encoders: checkpoints as Hugging Face's BertModel names them, workers with query, key and
/// value in one parameter, and embeddings, norms and pooler on every worker.

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Group;
using models::Rows;
using models::Sizes;
using models::Table;
using models::Units;

Table bert_table(const Options& options) {
  const Sizes sizes("bert", options,
                    {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "vocab_size", "max_position_embeddings", "type_vocab_size"});
  sizes.choice("model_type", {"bert"});
  const Index hidden = sizes.size("hidden_size");
  const Units heads = sizes.units("num_attention_heads");
  const Units inner = sizes.units("intermediate_size");
  (void)sizes.quotient("hidden_size", "num_attention_heads");

  Table table = sizes.table(DType::f32, "");
  table.layers = sizes.size("num_hidden_layers");
  table.ignored = {"{root}embeddings.position_ids", "{root}embeddings.token_type_ids"};

  Rows rows(table);
  const std::string embeddings = "{root}embeddings.";
  const std::string layer = "{root}encoder.layer.{l}.";
  const std::string attention = layer + "attention.self.";
  rows.whole(embeddings + "word_embeddings.weight", {sizes.size("vocab_size"), hidden});
  rows.whole(embeddings + "position_embeddings.weight",
             {sizes.size("max_position_embeddings"), hidden});
  rows.whole(embeddings + "token_type_embeddings.weight", {sizes.size("type_vocab_size"), hidden});
  rows.norm(embeddings + "LayerNorm", hidden, true);
  rows.group = Group::attention;
  rows.linear(Cut::column, attention + "qkv_proj",
              {{attention + "query", hidden, hidden, heads},
               {attention + "key", hidden, hidden, heads},
               {attention + "value", hidden, hidden, heads}},
              true);
  const std::string output = layer + "attention.output.dense";
  rows.linear(Cut::row, output, {{output, hidden, hidden, heads}}, true);
  rows.group = Group::dense;
  rows.norm(layer + "attention.output.LayerNorm", hidden, true);
  rows.align = sizes.size_or("intermediate_align", 1);
  const std::string up = layer + "intermediate.dense";
  rows.linear(Cut::column, up, {{up, inner.count, hidden, inner}}, true);
  const std::string down = layer + "output.dense";
  rows.linear(Cut::row, down, {{down, hidden, inner.count, inner}}, true);
  rows.align = 1;
  rows.norm(layer + "output.LayerNorm", hidden, true);
  rows.whole("{root}pooler.dense.weight", {hidden, hidden});
  rows.whole("{root}pooler.dense.bias", {hidden});
  return table;
}

}  // namespace

void add_model_bert(Registries& registries) {
  registries.models.add(
      "bert", "BERT encoders on tensor-parallel workers",
      [](const ModelContext& context) { return models::make_family(bert_table(context.options)); });
}

}  // namespace m2n
