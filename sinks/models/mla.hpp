// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Latent attention at decode time: kv_b_proj absorbed into two projections of each head.

#include <string>

#include "core/api/model.hpp"

namespace m2n::models {

struct MlaSizes {
  Index heads = 1;  ///< Of the worker.
  Index nope = 1;
  Index value = 1;
  Index rank = 1;   ///< kv_lora_rank
  Index block = 1;  ///< Of f8 weights' scales.
};

/// Adds W_UK_T [heads, nope, rank] and W_UV [heads, rank, value] (w_kc and w_vc in SGLang) of the
/// attention with prefix @p attention, "...self_attn.", to @p model: kv_b_proj, which must be a
/// parameter, as a matrix a head; dequantised to bf16 when it is f8 with scales.
void derive_absorbed(WorkerModel& model, const std::string& attention, const MlaSizes& sizes,
                     Engine engine);

}  // namespace m2n::models
