// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// gpt-oss: experts stacked in one tensor with alternating gate and up, in mxfp4 (blocks of 32
/// values in 16 bytes, a scale each) or plain, stored the other way round then. Gate and up stay
/// alternating at the workers.

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Experts;
using models::Group;
using models::Heads;
using models::Part;
using models::Row;
using models::Rows;
using models::Sizes;
using models::Table;
using models::Units;

std::vector<std::string> gpt_oss_keys() {
  std::vector<std::string> all = {"num_hidden_layers",   "intermediate_size",
                                  "num_local_experts",   "vocab_size",
                                  "tie_word_embeddings", "attention_bias",
                                  "quantization_config", "quantization_config.quant_method"};
  const auto heads = Heads::keys();
  all.insert(all.end(), heads.begin(), heads.end());
  return all;
}

void add_stacked(Rows& rows, const std::string& name, Cut cut, Part part, bool fold = false) {
  const std::string sglang =
      name.ends_with("_bias") ? name.substr(0, name.size() - 4) + "weight_bias" : "";
  rows.add({.name = name,
            .cut = cut,
            .parts = {std::move(part)},
            .group = Group::experts,
            .experts = Experts::stacked,
            .fold = fold,
            .sglang = sglang});
}

void add_experts(Rows& rows, const std::string& module, const Table& table, const Sizes& sizes) {
  constexpr Index kBlock = 32;
  const Index experts = table.experts;
  const Index hidden = sizes.size("hidden_size");
  const Index inner = sizes.size("intermediate_size");
  const Index both = checked_mul(inner, 2);
  Units units{"intermediate_size", inner, false, true};
  if (sizes.has("quantization_config")) {
    if (inner % kBlock != 0 || hidden % kBlock != 0) {
      throw Error(Errc::bad_argument, "intermediate_size " + std::to_string(inner) +
                                          " and hidden_size " + std::to_string(hidden) +
                                          " of a gpt_oss model must be multiples of 32");
    }
    units = {"blocks of 32 of intermediate_size", inner / kBlock, false, true};
    add_stacked(
        rows, module + ".w13_weight", Cut::column,
        {module + ".gate_up_proj_blocks", {experts, both, hidden / kBlock, 16}, units, DType::u8},
        true);
    add_stacked(
        rows, module + ".w13_weight_scale", Cut::column,
        {module + ".gate_up_proj_scales", {experts, both, hidden / kBlock}, units, DType::u8});
    add_stacked(
        rows, module + ".w2_weight", Cut::row,
        {module + ".down_proj_blocks", {experts, hidden, inner / kBlock, 16}, units, DType::u8},
        true);
    add_stacked(
        rows, module + ".w2_weight_scale", Cut::row,
        {module + ".down_proj_scales", {experts, hidden, inner / kBlock}, units, DType::u8});
  } else {
    Part wide{module + ".gate_up_proj", {experts, hidden, both}, units};
    Part tall{module + ".down_proj", {experts, inner, hidden}, units};
    wide.transposed = true;
    tall.transposed = true;
    add_stacked(rows, module + ".w13_weight", Cut::column, wide);
    add_stacked(rows, module + ".w2_weight", Cut::row, tall);
  }
  add_stacked(rows, module + ".w13_bias", Cut::column,
              {module + ".gate_up_proj_bias", {experts, both}, units});
  add_stacked(rows, module + ".w2_bias", Cut::first,
              {module + ".down_proj_bias", {experts, hidden}});
}

Table gpt_oss_table(const Options& options) {
  const Sizes sizes("gpt_oss", options, gpt_oss_keys());
  sizes.choice("model_type", {"gpt_oss"});
  const Heads heads(sizes);
  const bool quantised = sizes.has("quantization_config");
  if (quantised && sizes.text("quantization_config.quant_method", "mxfp4") != "mxfp4") {
    throw Error(Errc::bad_argument, "quantization method '" +
                                        sizes.text("quantization_config.quant_method", "") +
                                        "' is not known for gpt_oss; it must be mxfp4, or none");
  }

  Table table = sizes.table(DType::bf16, "model.");
  table.layers = sizes.size("num_hidden_layers");
  table.experts = sizes.size("num_local_experts");
  table.ignored = {"{root}layers.{l}.self_attn.rotary_emb.inv_freq"};
  if (quantised) {
    table.not_plain = "the model is quantised";
  }

  Rows rows(table);
  const Units words = sizes.units("vocab_size");
  rows.vocab("{root}embedding.weight", "{root}embed_tokens.weight", words, heads.hidden);
  const std::string layer = "{root}layers.{l}.";
  const std::string attention = layer + "self_attn.";
  rows.norm(layer + "input_layernorm", heads.hidden);
  rows.attention(attention, heads,
                 {.qkv_bias = true, .output_bias = true, .worker = layer + "attn."});
  rows.add({.name = layer + "attn.sinks",
            .cut = Cut::column,
            .parts = {{attention + "sinks", {heads.query.count}, heads.query}},
            .group = Group::attention,
            .plain = false});
  rows.norm(layer + "post_attention_layernorm", heads.hidden);
  rows.whole(layer + "mlp.router.weight", {table.experts, heads.hidden});
  rows.whole(layer + "mlp.router.bias", {table.experts});
  add_experts(rows, layer + "mlp.experts", table, sizes);
  rows.norm("{root}norm", heads.hidden);
  rows.vocab("lm_head.weight", "lm_head.weight", words, heads.hidden);
  return table;
}

}  // namespace

void add_model_gpt_oss(Registries& registries) {
  registries.models.add("gpt_oss", "gpt-oss: stacked experts, mxfp4 or plain",
                        [](const ModelContext& context) {
                          return models::make_family(gpt_oss_table(context.options));
                        });
}

}  // namespace m2n
