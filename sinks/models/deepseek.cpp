// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// DeepSeek-V3 and Kimi-K2: latent attention, experts with a shared one, block-scaled f8 (or plain)
/// linear layers, and prediction layers behind the last, which belong to the draft model.
///
///   draft=none|also|only   whose parameters a worker keeps: the model's, both, or the draft's

#include <algorithm>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/error.hpp"
#include "sinks/models/mla.hpp"
#include "sinks/models/rows.hpp"

namespace m2n {
namespace {

using models::Cut;
using models::Group;
using models::Linear;
using models::MlaSizes;
using models::Quantization;
using models::Row;
using models::Rows;
using models::Scales;
using models::Seat;
using models::Sizes;
using models::Table;
using models::Units;

const std::vector<std::string> kDeepseekTypes = {"deepseek_v3", "kimi_k2"};

std::vector<std::string> deepseek_keys() {
  std::vector<std::string> all = {"hidden_size",
                                  "num_hidden_layers",
                                  "num_attention_heads",
                                  "q_lora_rank",
                                  "kv_lora_rank",
                                  "qk_nope_head_dim",
                                  "qk_rope_head_dim",
                                  "v_head_dim",
                                  "intermediate_size",
                                  "moe_intermediate_size",
                                  "n_routed_experts",
                                  "n_shared_experts",
                                  "n_group",
                                  "first_k_dense_replace",
                                  "num_nextn_predict_layers",
                                  "vocab_size",
                                  "tie_word_embeddings",
                                  "experts_order",
                                  "draft"};
  const auto more = Quantization::keys();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

class Deepseek {
 public:
  explicit Deepseek(const Options& options)
      : sizes_("deepseek_v3", options, deepseek_keys()),
        kimi_(sizes_.choice("model_type", kDeepseekTypes) == "kimi_k2"),
        quantization_(sizes_),
        hidden_(sizes_.size("hidden_size")),
        heads_(sizes_.units("num_attention_heads")),
        mla_{heads_.count, sizes_.size("qk_nope_head_dim"), sizes_.size("v_head_dim"),
             sizes_.size("kv_lora_rank"), quantization_.block},
        more_(sizes_.count_or("num_nextn_predict_layers", 0)),
        table_(sizes_.table(DType::bf16, "model.")),
        rows_(table_) {}

  Table make() {
    table_.layers = sizes_.size("num_hidden_layers");
    table_.experts = sizes_.size("n_routed_experts");
    table_.expert_groups = sizes_.size_or("n_group", 1);
    table_.ignored = {"{root}layers.{l}.self_attn.rotary_emb.inv_freq"};
    quantization_.mark(table_);
    rows_.block = quantization_.block;
    const bool tied = sizes_.flag("tie_word_embeddings", false);
    rows_.embedding(sizes_, hidden_, "{root}embed_tokens", tied);
    const Index dense = std::min(sizes_.count_or("first_k_dense_replace", 0), table_.layers);
    decoder_layers({0, dense}, false);
    decoder_layers({dense, table_.layers}, true);
    const std::size_t main_end = table_.rows.size();
    prediction_layers();
    const std::size_t draft_end = table_.rows.size();
    rows_.layers = {};
    rows_.norm("{root}norm", hidden_);
    rows_.head(sizes_, hidden_, "{root}embed_tokens", tied);
    select(main_end, draft_end);
    derive();
    return std::move(table_);
  }

 private:
  void decoder_layers(const Interval& layers, bool moe) {
    if (layers.empty()) {
      return;
    }
    rows_.layers = layers;
    rows_.norm(kLayer + "input_layernorm", hidden_);
    rows_.norm(kLayer + "post_attention_layernorm", hidden_);
    attention(kLayer + "self_attn.");
    if (kimi_) {  // a stray buffer
      rows_.whole(kLayer + "self_attn.rotary_emb.inv_freq", {hidden_ / heads_.count / 2}).kept =
          false;
    }
    rows_.scales = quantization_.scales;
    rows_.align = sizes_.size_or("intermediate_align", 1);
    if (moe) {
      experts(kLayer + "mlp.");
    } else {
      rows_.gated_mlp(kLayer + "mlp.", hidden_, sizes_.units("intermediate_size"));
    }
    rows_.align = 1;
    rows_.scales = Scales::none;
  }

  void attention(const std::string& prefix) {
    rows_.scales = quantization_.scales;
    rows_.group = Group::attention;
    const Index query = checked_mul(heads_.count, mla_.nope + sizes_.size("qk_rope_head_dim"));
    const Linear kv_a{prefix + "kv_a_proj_with_mqa", mla_.rank + sizes_.size("qk_rope_head_dim"),
                      hidden_};
    if (const Index rank = sizes_.count_or("q_lora_rank", 0); rank > 0) {
      const std::size_t fused = table_.rows.size();
      rows_.linear(Cut::whole, prefix + "fused_qkv_a_proj",
                   {{prefix + "q_a_proj", rank, hidden_}, kv_a});
      for (std::size_t i = fused; i < table_.rows.size(); ++i) {
        Row& row = table_.rows[i];
        row.sglang = row.name;
        row.sglang.insert(row.name.rfind('.'), "_with_mqa");
      }
      rows_.norm(prefix + "q_a_layernorm", rank);
      rows_.linear(Cut::column, prefix + "q_b_proj", {{prefix + "q_b_proj", query, rank, heads_}});
    } else {
      rows_.linear(Cut::column, prefix + "q_proj", {{prefix + "q_proj", query, hidden_, heads_}});
      rows_.linear(Cut::whole, kv_a.module, {kv_a});
    }
    rows_.norm(prefix + "kv_a_layernorm", mla_.rank);
    rows_.linear(Cut::column, prefix + "kv_b_proj",
                 {{prefix + "kv_b_proj", checked_mul(heads_.count, mla_.nope + mla_.value),
                   mla_.rank, heads_}});
    rows_.linear(Cut::row, prefix + "o_proj",
                 {{prefix + "o_proj", hidden_, checked_mul(heads_.count, mla_.value), heads_}});
    rows_.group = Group::dense;
    rows_.scales = Scales::none;
  }

  void experts(const std::string& prefix) {
    rows_.whole(prefix + "gate.weight", {table_.experts, hidden_});
    Row& bias = rows_.whole(prefix + "gate.e_score_correction_bias", {table_.experts});
    bias.parts.front().dtype = DType::f32;
    bias.keep_dtype = true;
    const Units inner = sizes_.units("moe_intermediate_size");
    rows_.experts(prefix + "experts", hidden_, inner, {},
                  sizes_.text("experts_order", "gate_up") == "up_gate");
    if (const Index shared = sizes_.count_or("n_shared_experts", 0); shared > 0) {
      rows_.gated_mlp(prefix + "shared_experts.", hidden_,
                      {inner.name, checked_mul(inner.count, shared)});
    }
  }

  void prediction_layers() {
    const std::size_t begin = table_.rows.size();
    decoder_layers({table_.layers, checked_add(table_.layers, more_)}, true);
    if (begin == table_.rows.size()) {
      return;
    }
    for (std::size_t i = begin; i < table_.rows.size(); ++i) {
      Row& row = table_.rows[i];
      for (std::string* name : {&row.name, &row.sglang, &row.scales}) {
        if (name->starts_with(kLayer)) {
          name->insert(kLayer.size(), kBlock);
        }
      }
    }
    const Units words = sizes_.units("vocab_size");
    for (const char* name : {"embed_tokens.weight", "shared_head.head.weight"}) {
      rows_.vocab(kLayer + name, kLayer + name, words, hidden_);
    }
    for (const char* name : {"enorm", "hnorm", "shared_head.norm"}) {
      rows_.norm(kLayer + name, hidden_);
    }
    rows_.whole(kLayer + "eh_proj.weight", {hidden_, checked_mul(hidden_, 2)});
  }

  void select(std::size_t main_end, std::size_t draft_end) {
    const std::string draft = sizes_.text("draft", "none");
    if (draft != "none" && draft != "also" && draft != "only") {
      throw Error(Errc::bad_argument, "draft is '" + draft + "'; it must be none, also or only");
    }
    for (std::size_t i = 0; i < table_.rows.size(); ++i) {
      const bool of_draft = i >= main_end && i < draft_end;
      if (of_draft ? draft == "none" : draft == "only") {
        table_.rows[i].kept = false;
      }
    }
  }

  void derive() {
    table_.derive = [sizes = mla_, layers = table_.layers, more = more_,
                     prefix = table_.worker_root + "layers."](
                        WorkerModel& model, const Deployment& deployment, const Seat& seat) {
      MlaSizes mine = sizes;
      mine.heads /= seat.attention.workers;
      for (Index layer = 0; layer < layers + more; ++layer) {
        models::derive_absorbed(
            model,
            prefix + std::to_string(layer) + "." + (layer < layers ? "" : kBlock) + "self_attn.",
            mine, deployment.engine);
      }
    };
  }

  inline static const std::string kLayer = "{root}layers.{l}.";
  inline static const std::string kBlock = "mtp_block.";

  Sizes sizes_;
  bool kimi_;
  Quantization quantization_;
  Index hidden_;
  Units heads_;
  MlaSizes mla_;
  Index more_;  ///< Prediction layers.
  Table table_;
  Rows rows_;
};

}  // namespace

void add_model_deepseek(Registries& registries) {
  for (const std::string& type : kDeepseekTypes) {
    registries.models.add(type, "latent attention and experts: deepseek_v3, kimi_k2",
                          [type](const ModelContext& context) {
                            Options options = context.options;
                            options["model_type"] = type;
                            return models::make_family(Deepseek(options).make());
                          });
  }
}

}  // namespace m2n
