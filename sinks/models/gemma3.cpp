// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Gemma-3: text alone (gemma3_text), or with a vision tower and a projector (gemma3). The head is
/// tied.

#include "core/api/plugins.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Group;
using models::Heads;
using models::Place;
using models::Rows;
using models::Sizes;
using models::Table;
using models::Units;

std::vector<std::string> keys(bool vision) {
  std::vector<std::string> all = {"num_hidden_layers", "intermediate_size", "vocab_size"};
  for (const std::string& key : Heads::keys()) {
    all.push_back(key);
  }
  if (!vision) {
    return all;
  }
  const std::vector<std::string> text = all;
  for (const std::string& key : text) {
    all.push_back("text_config." + key);
  }
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads",
                          "intermediate_size", "image_size", "patch_size", "num_channels"}) {
    all.push_back(std::string("vision_config.") + key);
  }
  return all;
}

void add_text(Rows& rows, const Sizes& sizes) {
  const Heads heads(sizes);
  const std::string layer = "{root}layers.{l}.";
  rows.embedding(sizes, heads.hidden, "{root}embed_tokens", true);
  rows.norm(layer + "input_layernorm", heads.hidden);
  rows.attention(layer + "self_attn.", heads, {.norms = true});
  for (const char* norm :
       {"post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
    rows.norm(layer + norm, heads.hidden);
  }
  rows.align = sizes.size_or("intermediate_align", 1);
  rows.gated_mlp(layer + "mlp.", heads.hidden, sizes.units("intermediate_size"));
  rows.align = 1;
  rows.norm("{root}norm", heads.hidden);
  rows.head(sizes, heads.hidden, "{root}embed_tokens", true);
}

/// SigLIP, on the first stage.
void add_vision(Rows& rows, const Sizes& sizes) {
  const Index hidden = sizes.size("hidden_size");
  const Index patch = sizes.size("patch_size");
  const Index patches = sizes.quotient("image_size", "patch_size");
  const Units heads = sizes.units("num_attention_heads");
  const Units inner = sizes.units("intermediate_size");
  const std::string tower = "vision_tower.vision_model.";
  rows.place = Place::first;
  rows.whole(tower + "embeddings.patch_embedding.weight",
             {hidden, sizes.size_or("num_channels", 3), patch, patch});
  rows.whole(tower + "embeddings.patch_embedding.bias", {hidden});
  const std::string position = tower + "embeddings.position_embedding.weight";
  rows.vocab(position, position, {"position", checked_mul(patches, patches)}, hidden);
  rows.layers = {0, sizes.size("num_hidden_layers")};
  const std::string layer = tower + "encoder.layers.{l}.";
  const std::string attention = layer + "self_attn.";
  rows.norm(layer + "layer_norm1", hidden, true);
  rows.group = Group::attention;
  rows.linear(Cut::column, attention + "qkv_proj",
              {{attention + "q_proj", hidden, hidden, heads},
               {attention + "k_proj", hidden, hidden, heads},
               {attention + "v_proj", hidden, hidden, heads}},
              true);
  rows.linear(Cut::row, attention + "out_proj", {{attention + "out_proj", hidden, hidden, heads}},
              true);
  rows.group = Group::dense;
  rows.norm(layer + "layer_norm2", hidden, true);
  const std::string mlp = layer + "mlp.";
  rows.linear(Cut::column, mlp + "fc1", {{mlp + "fc1", inner.count, hidden, inner}}, true);
  rows.linear(Cut::row, mlp + "fc2", {{mlp + "fc2", hidden, inner.count, inner}}, true);
  rows.layers = {};
  rows.norm(tower + "post_layernorm", hidden, true);
}

Table gemma3_table(const Options& options, bool vision) {
  const Sizes sizes(vision ? "gemma3" : "gemma3_text", options, keys(vision));
  sizes.choice("model_type", {vision ? "gemma3" : "gemma3_text"});
  Table table = sizes.table(DType::bf16, vision ? "language_model.model." : "model.");
  Sizes text = vision ? sizes.inner("text_config") : sizes;
  if (vision) {  // published configs say only what differs from the 4B model
    text.otherwise("num_attention_heads", "8");
    text.otherwise("num_key_value_heads", "4");
    text.otherwise("head_dim", "256");
    text.otherwise("vocab_size", "262208");
  }
  table.layers = text.size("num_hidden_layers");
  table.ignored = {"{root}layers.{l}.self_attn.rotary_emb.inv_freq"};
  Rows rows(table);
  add_text(rows, text);
  if (vision) {
    const Sizes tower = sizes.inner("vision_config");
    add_vision(rows, tower);
    const std::string projector = "multi_modal_projector.";
    rows.whole(projector + "mm_input_projection_weight",
               {tower.size("hidden_size"), text.size("hidden_size")});
    rows.norm(projector + "mm_soft_emb_norm", tower.size("hidden_size"));
    table.ignored.emplace_back("vision_tower.vision_model.embeddings.position_ids");
  }
  return table;
}

}  // namespace

void add_model_gemma3(Registries& registries) {
  for (const bool vision : {false, true}) {
    registries.models.add(vision ? "gemma3" : "gemma3_text",
                          vision ? "Gemma-3 with a vision tower" : "Gemma-3, text alone",
                          [vision](const ModelContext& context) {
                            return models::make_family(gemma3_table(context.options, vision));
                          });
  }
}

}  // namespace m2n
