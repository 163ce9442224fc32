// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/megatron/grid.hpp"

#include <numeric>
#include <string>

#include "core/error.hpp"

namespace m2n::sources::megatron {

namespace {

std::string text(Index value) { return std::to_string(value); }

/// Stages from consecutive runs of layers: run k is of stage k mod @p stages.
std::vector<Index> from_runs(const std::vector<Index>& runs, Index stages) {
  std::vector<Index> stage;
  Index next = 0;
  for (const Index run : runs) {
    stage.insert(stage.end(), static_cast<std::size_t>(run), next);
    next = (next + 1) % stages;
  }
  return stage;
}

}  // namespace

Grid read_grid(const OptionReader& options, Rank ranks) {
  Grid grid;
  grid.ranks = ranks;
  grid.tensor = options.number("tensor_parallel", 1);
  grid.pipeline = options.number("pipeline_parallel", 1);
  grid.expert = options.number("expert_parallel", 1);
  grid.expert_tensor = options.number("expert_tensor_parallel", grid.tensor);
  const Index context = options.number("context_parallel", 1);
  const Index dense = checked_mul(checked_mul(grid.tensor, context), grid.pipeline);
  if (ranks % dense != 0) {
    options.refuse("tensor_parallel * context_parallel * pipeline_parallel = " + text(dense) +
                   " must divide the " + text(ranks) + " trainer ranks");
  }
  const Index sparse = checked_mul(checked_mul(grid.expert_tensor, grid.expert), grid.pipeline);
  if (ranks % sparse != 0) {
    options.refuse("expert_tensor_parallel * expert_parallel * pipeline_parallel = " +
                   text(sparse) + " must divide the " + text(ranks) + " trainer ranks");
  }
  return grid;
}

std::vector<Index> read_stages(const OptionReader& options, const Grid& grid, Index layers) {
  const Index stages = grid.pipeline;
  const Index chunks = options.number("virtual_pipeline", 1);
  const bool embedding = options.boolean("account_embedding", false);
  const bool loss = options.boolean("account_loss", false);
  const bool uneven = options.has("first_stage_layers") || options.has("last_stage_layers");
  const int ways = (options.has("stage_layers") ? 1 : 0) + (chunks > 1 ? 1 : 0) +
                   (embedding || loss ? 1 : 0) + (uneven ? 1 : 0);
  if (ways > 1) {
    options.refuse(
        "give only one of stage_layers, virtual_pipeline, first_stage_layers with "
        "last_stage_layers, and account_embedding with account_loss");
  }
  if (options.has("stage_layers")) {
    const auto runs = options.numbers("stage_layers");
    Index sum = 0;
    for (const Index run : runs) {
      sum = checked_add(sum, run);
    }
    if (sum != layers || static_cast<Index>(runs.size()) % stages != 0) {
      options.refuse("stage_layers", "expected " + text(stages) +
                                         " numbers (or a multiple) with the sum " + text(layers));
    }
    return from_runs(runs, stages);
  }
  if (uneven) {
    const bool has_first = options.has("first_stage_layers");
    const bool has_last = options.has("last_stage_layers");
    const Index first = options.number("first_stage_layers", 0, 0);
    const Index last = options.number("last_stage_layers", 0, 0);
    const Index others = stages - (has_first ? 1 : 0) - (has_last ? 1 : 0);
    const Index left = first > layers || last > layers - first ? -1 : layers - first - last;
    if (left < 0 || others < 0 || (others == 0 ? left != 0 : left % others != 0)) {
      options.refuse("first_stage_layers=" + text(first) + " and last_stage_layers=" + text(last) +
                     " of " + text(layers) + " layers must leave a multiple of the other " +
                     text(others < 0 ? 0 : others) + " stages");
    }
    std::vector<Index> runs(static_cast<std::size_t>(stages), others > 0 ? left / others : 0);
    if (has_first) {
      runs.front() = first;
    }
    if (has_last) {
      runs.back() = last;
    }
    return from_runs(runs, stages);
  }
  const Index counted = layers + (embedding ? 1 : 0) + (loss ? 1 : 0);
  const Index parts = checked_mul(stages, chunks);
  if (counted % parts != 0) {
    options.refuse(text(layers) + " layers" +
                   (counted > layers ? " and " + text(counted - layers) + " more that count" : "") +
                   " do not divide by pipeline_parallel" +
                   (chunks > 1 ? " * virtual_pipeline = " : "=") + text(parts));
  }
  std::vector<Index> runs(static_cast<std::size_t>(parts), counted / parts);
  if (counted > 0) {
    runs.front() -= embedding ? 1 : 0;
    runs.back() -= loss ? 1 : 0;
  }
  if (runs.front() < 0 || runs.back() < 0) {
    options.refuse("account_embedding and account_loss need room for both in one stage");
  }
  return from_runs(runs, stages);
}

}  // namespace m2n::sources::megatron
