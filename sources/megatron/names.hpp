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
};

enum class Place : std::uint8_t { first_stage, layer, last_stage };

struct Holding {
  Kind kind = Kind::replicated;
  Place place = Place::layer;
  Index layer = 0;              ///< Global, for Place::layer.
  std::optional<Index> expert;  ///< Global.
  std::string buffer;  ///< Local parameter that holds it; siblings of a fused one share it.
};

/// How @p name is held, or nothing for a name that is not known.
/// @param mla_layers  Prefixes ("model.layers.3.") of layers with multi-head latent attention,
///                    whose q_proj is an ordinary column-parallel layer; see mla_prefix().
std::optional<Holding> holding_of(const std::string& name,
                                  const std::unordered_set<std::string>& mla_layers);

/// The layer's prefix when @p name shows that the layer has latent attention.
std::optional<std::string> mla_prefix(const std::string& name);

}  // namespace m2n::sources::megatron
