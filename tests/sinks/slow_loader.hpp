// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What inference engines' own loaders do with a checkpoint, tensor by tensor and element by
/// element, from the names and the sizes of a model alone: an oracle that knows no sections.

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/api/sink.hpp"
#include "core/api/values.hpp"

namespace m2n::testing {

/// Sizes of a small model, as an engine knows them.
struct SlowModel {
  Index heads = 1;
  Index kv_heads = 1;
  Index head = 1;  ///< Elements; of latent attention q's.
  Index experts = 0;
  Index layers = 1;
  Index block = 1;  ///< Of f8 scales.
  Index vocab_padding = 64;
  bool alternating = false;  ///< gpt-oss
  Index together = 32;       ///< Its gate rows that no cut parts: 1 when not quantised.
  bool gpt2 = false;
  /// What becomes of f8 weights and their scales when all is loaded.
  enum class Scales : std::uint8_t { as_stored, one, power_of_two } scales = Scales::as_stored;
  bool tied = false;  ///< The last stage needs the embedding, too.
};

/// One worker's part, as an engine counts it.
struct SlowSeat {
  Index tp = 1, tp_rank = 0;  ///< Dense layers.
  Index attention = 1, attention_rank = 0;
  Index moe_tp = 1, moe_tp_rank = 0;     ///< Inside an expert.
  std::vector<Index> slots;              ///< Expert of each local slot.
  Index first_layer = 0, end_layer = 1;  ///< Of this stage.
  bool first_stage = true, last_stage = true;
  bool sglang = false;
};

/// The bytes of every parameter that the worker keeps, by name. Names, shapes and dtypes are taken
/// from @p parameters; what no tensor feeds is 0.
/// @throws std::logic_error for a tensor that fits no rule, or an element that leaves its
/// parameter.
std::map<std::string, std::vector<std::byte>> slowly_load(
    const SlowModel& model, const SlowSeat& seat, const std::vector<LiveParameter>& parameters,
    const TensorValues& checkpoint);

}  // namespace m2n::testing
