// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Megatron-LM's arrangement of ranks and pipeline stages.

#include <vector>

#include "core/layout/mesh.hpp"
#include "sources/options.hpp"

namespace m2n::sources::megatron {

/// Order "tp-cp-ep-dp-pp", leftmost fastest. Dense parameters:
/// rank = tp + TP * (cp + CP * (dp + DP * pp)); experts: rank = etp + ETP * (ep + EP * (edp + EDP *
/// pp)). A pipeline stage is the same block of ranks in both.
struct Grid {
  Index ranks = 1;
  Index tensor = 1;         ///< TP
  Index pipeline = 1;       ///< PP
  Index expert = 1;         ///< EP
  Index expert_tensor = 1;  ///< ETP

  Index stage_ranks() const noexcept { return ranks / pipeline; }
  Index stage_of(Rank rank) const noexcept { return rank / stage_ranks(); }
  Index tensor_of(Rank rank) const noexcept { return rank % stage_ranks() % tensor; }
  Index expert_tensor_of(Rank rank) const noexcept { return rank % stage_ranks() % expert_tensor; }
  Index expert_of(Rank rank) const noexcept {
    return rank % stage_ranks() / expert_tensor % expert;
  }
};

/// Reads tensor_parallel, pipeline_parallel, context_parallel, expert_parallel and
/// expert_tensor_parallel. @throws Error{usage} when they do not divide the ranks.
Grid read_grid(const OptionReader& options, Rank ranks);

/// Stage of each of @p layers global layers. Reads virtual_pipeline, first_stage_layers,
/// last_stage_layers, account_embedding, account_loss and stage_layers.
/// @throws Error{usage} naming the numbers that do not divide or add up.
std::vector<Index> read_stages(const OptionReader& options, const Grid& grid, Index layers);

}  // namespace m2n::sources::megatron
