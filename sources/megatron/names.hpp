// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What Megatron does to a tensor, from its checkpoint name: by layer kind, never by shape.

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>

#include "core/tensor/shape.hpp"

namespace m2n::sources::megatron {

enum class Kind : std::uint8_t {
  replicated,  ///< Whole on every TP rank.
  column,      ///< Rows cut evenly.
  row,         ///< Columns cut evenly.
  query,       ///< Members of linear_qkv.
  key,
  value,
  gate,  ///< Halves of linear_fc1.
  up,
  embedding,  ///< Padded vocabulary rows, first stage (and last, when tied).
  head,       ///< Padded vocabulary rows, last stage.
  // Conv1D tensors, stored [in, out] in the checkpoint and [out, in] by Megatron.
  conv_column,
  conv_row,
  conv_qkv,  ///< Columns q | k | v.
  // All experts of a layer in one tensor: dimension 0.
  stacked,          ///< Only the experts are shared out.
  stacked_rows,     ///< Dimension 1 cut evenly.
  stacked_columns,  ///< Dimension 2 cut evenly.
  // The same stored [expert, in, out] in the checkpoint and [expert, out, in] by Megatron.
  stacked_conv_rows,
  stacked_conv_columns,
};

enum class Place : std::uint8_t { first_stage, layer, last_stage };

struct Holding {
  Kind kind = Kind::replicated;
  Place place = Place::layer;
  Index layer = 0;              ///< Global, for Place::layer.
  std::optional<Index> expert;  ///< Global.
  std::string buffer;       ///< Local parameter that holds it; siblings of a fused one share it.
  std::string weight = {};  ///< Of scales: the tensor that has a block for each of their elements.
};

/// Layers that are not like the others, by prefix ("model.layers.3."): their names show it.
struct LayerKinds {
  /// Multi-head latent attention: q_proj is an ordinary column-parallel layer.
  std::unordered_set<std::string> mla = {};
  /// Prediction layers behind the model's last: the last stage's, with copies of embedding and
  /// head.
  std::unordered_set<std::string> prediction = {};

  void add(const std::string& name);
};

/// How @p name is held, or nothing for a name that is not known.
std::optional<Holding> holding_of(const std::string& name, const LayerKinds& layers);

}  // namespace m2n::sources::megatron
