// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The tensors of published checkpoints, and the sharded problems that large runs make of them.

#include <memory>
#include <string>

#include "core/api/model.hpp"
#include "core/plan/problem.hpp"

namespace m2n::testing {

/// The family of a file of experiments/models; @p options win over it.
std::unique_ptr<ModelFamily> published_model(const std::string& model, Options options = {});
Catalogue deepseek_v3();
Catalogue kimi_k2();
Catalogue qwen3_235b();
/// DeepSeek-V3 with another number of experts, for growth.
Catalogue deepseek_v3_with_experts(Index experts);

struct Deployment {
  Rank trainers = 0;         ///< Ranks [0, trainers): FSDP2 over all of them for dense tensors.
  Rank expert_parallel = 1;  ///< Experts e * expert_parallel / E; replicas over the other ranks.
  Rank workers = 0;          ///< Ranks [trainers, trainers + workers).
  Rank tensor_parallel = 1;  ///< Inside a replica of consecutive workers; the rest are replicas.
};

/// Dense tensors: Shard(0) over all trainers. Expert tensors: whole on the ranks of their EP group.
/// Workers: column-parallel tensors cut by rows, row-parallel by columns, embeddings by rows, the
/// others replicated; experts are cut like a dense MLP.
Problem sharded_problem(const Catalogue& catalogue, const Deployment& deployment);

}  // namespace m2n::testing
