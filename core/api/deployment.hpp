// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How workers share a model: which part of a deployment each of them is.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/api/registry.hpp"
#include "core/layout/mesh.hpp"

namespace m2n {

/// Whose arrangement of ranks and names the workers have.
enum class Engine : std::uint8_t { vllm, sglang };

/// Which experts stand in which slots. Slots are numbered over the expert-parallel ranks of a
/// layer: the first rank has the first ones.
struct ExpertPlacement {
  bool round_robin = false;  ///< Expert e on rank e mod EP, where the engine honours it.
  Index redundant = 0;       ///< Slots beyond one an expert.
  /// By layer: the expert of each slot, as the engine says. A layer that is not here has expert
  /// p mod E in slot p. Only with a version.
  std::map<Index, std::vector<Index>> slots = {};
  std::uint64_t version = 0;  ///< Of `slots`: a plan for another version is stale.
};

/// A deployment of workers, in replicas that know nothing of each other.
///
/// vllm: worker = ((replica * DP + dp) * PP + pp) * TP + tp. Experts are cut like a dense layer
/// over all DP * TP ranks of a stage, or, with expert_parallel = DP * TP, whole on one of them.
/// sglang: worker = (replica * PP + pp) * TP + tp, and everything else lies inside TP: attention is
/// cut over TP / DP ranks, experts lie on EP groups of TP / EP ranks that cut them.
struct Deployment {
  Rank workers = 1;
  Index tensor_parallel = 1;
  Index pipeline_parallel = 1;
  Index data_parallel = 1;
  Index expert_parallel = 1;
  Engine engine = Engine::vllm;
  std::vector<Index> stage_layers = {};  ///< Layers of each stage; empty: the engine's rule.
  ExpertPlacement experts = {};
};

/// Workers of one replica: worker w keeps what worker w mod that many keeps.
/// @throws Error{bad_argument} when sizes are not positive or do not fill the workers.
Rank replica_workers(const Deployment& deployment);

/// Takes the keys of a deployment out of @p options: tensor_parallel (default: as many as fill the
/// workers), pipeline_parallel, data_parallel, expert_parallel, engine=vllm|sglang,
/// pipeline_layers=16,15,15,15, expert_placement=linear|round_robin, redundant_experts and
/// expert_map=FILE, a JSON object {"version": 3, "layers": {"3": [0, 1, 2, ...]}}.
/// @throws Error{usage} naming key and value; Error{io, bad_argument} for the file.
Deployment take_deployment(Options& options, Rank workers);

}  // namespace m2n
