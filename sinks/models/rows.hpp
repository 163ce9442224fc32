// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Rows that families share: linear layers with biases and scales, attention, MLPs, experts.

#include <string>
#include <vector>

#include "sinks/models/family.hpp"
#include "sinks/models/sizes.hpp"

namespace m2n::models {

/// A linear layer of a checkpoint: [out, in].
struct Linear {
  std::string module;
  Index out = 1;
  Index in = 1;
  Units units = {};  ///< Of the dimension that is cut.
};

struct Heads {
  Index hidden = 1;
  Index head = 1;  ///< Elements of one.
  Units query;
  Units kv;

  /// From hidden_size, num_attention_heads, num_key_value_heads and head_dim.
  explicit Heads(const Sizes& sizes);
  static std::vector<std::string> keys();
};

/// What a layer's names and biases are.
struct AttentionStyle {
  bool qkv_bias = false;
  bool output_bias = false;
  bool norms = false;       ///< Of each query and key head.
  std::string worker = {};  ///< Prefix at the workers; empty: as in the checkpoint.
  std::string output = "o_proj";
};

/// The three layers of an expert, by name: gate and up are stacked in w13, in this order.
struct ExpertNames {
  std::string gate = "gate_proj";
  std::string up = "up_proj";
  std::string down = "down_proj";
};

enum class Scales : std::uint8_t {
  none,
  blocks,  ///< f8_e4m3 weights, one f32 a block in weight_scale_inv.
  tensor,  ///< f8_e4m3 weights, one f32 a tensor in weight_scale.
};

/// How quantization_config says that linear layers are stored. @throws Error{bad_argument} for a
/// method that is not fp8.
struct Quantization {
  explicit Quantization(const Sizes& sizes);
  static std::vector<std::string> keys();
  /// Says so in @p table.
  void mark(Table& table) const;

  Scales scales = Scales::none;
  Index block = 128;
  /// Option "scales": "as_stored" (default), "one" (of tensors), "power_of_two" (of blocks).
  Requantise requantise = Requantise::no;

 private:
  void read(const Sizes& sizes);
};

/// Appends to a table. Members say what the rows that follow have in common.
class Rows {
 public:
  explicit Rows(Table& table) : rows_(table.rows) {}

  Interval layers = {};
  Place place = Place::layer;
  Group group = Group::dense;
  Scales scales = Scales::none;
  Index block = 128;
  Index align = 1;

  Row& add(Row row);
  /// A tensor that every worker keeps, under the same name.
  Row& whole(const std::string& name, const Shape& shape);
  void norm(const std::string& module, Index size, bool bias = false);
  void vocab(const std::string& name, const std::string& tensor, const Units& words, Index hidden);
  /// Embedding, and the head: tied, tied and kept apart, or with a tensor of its own.
  void embedding(const Sizes& sizes, Index hidden, const std::string& module, bool tied);
  void head(const Sizes& sizes, Index hidden, const std::string& embedding, bool tied);

  /// Layers that lie behind one another in a worker's @p module; scales and biases with them.
  void linear(Cut cut, const std::string& module, const std::vector<Linear>& parts,
              bool bias = false);
  /// q, k and v in one, norms, and the output. @param prefix  "...self_attn.".
  void attention(const std::string& prefix, const Heads& heads, const AttentionStyle& style = {});
  void gated_mlp(const std::string& prefix, Index hidden, const Units& inner, bool bias = false);
  /// w13 and w2 of experts whose tensors are @p module.{e}.*. @param up_first  up before gate.
  void experts(const std::string& module, Index hidden, const Units& inner,
               const ExpertNames& names = {}, bool up_first = false);

 private:
  std::vector<Row>& rows_;
};

}  // namespace m2n::models
