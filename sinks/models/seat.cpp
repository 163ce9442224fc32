// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/seat.hpp"

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "sinks/fail.hpp"

namespace m2n::models {
namespace {

std::string number(Index value) { return std::to_string(value); }

}  // namespace

Seat seat_of(const Deployment& d, Rank worker) {
  const bool vllm = d.engine == Engine::vllm;
  const Index tp = d.tensor_parallel;
  const Index pp = d.pipeline_parallel;
  const Index dp = d.data_parallel;
  const Index ep = d.expert_parallel;
  const Index replica = replica_workers(d);
  if (worker < 0 || worker >= d.workers) {
    fail("worker " + number(worker) + " is not one of " + number(d.workers));
  }
  const Index at = worker % replica;
  const Index tensor = at % tp;
  Seat seat;
  seat.stages = {pp, at / tp % pp};
  seat.dense = {tp, tensor};
  if (vllm) {
    const Index all = dp * tp;
    if (ep != 1 && ep != all) {
      fail("expert_parallel is " + number(ep) +
           "; in vLLM it is 1 or data_parallel * "
           "tensor_parallel, which is " +
           number(all));
    }
    const Index data = at / (tp * pp);
    const Share flat{all, data * tp + tensor};
    seat.attention = seat.dense;
    seat.experts = ep == 1 ? Share{} : flat;
    seat.inside = ep == 1 ? flat : Share{};
    return seat;
  }
  if (tp % dp != 0 || tp % ep != 0) {
    fail("tensor_parallel is " + number(tp) + "; in SGLang it is a multiple of data_parallel, " +
         number(dp) + ", and of expert_parallel, " + number(ep));
  }
  seat.attention = {tp / dp, tensor % (tp / dp)};
  seat.experts = {ep, tensor / (tp / ep)};
  seat.inside = {tp / ep, tensor % (tp / ep)};
  return seat;
}

std::vector<Index> layers_of_stages(const Deployment& d, Index layers) {
  const Index stages = d.pipeline_parallel;
  if (!d.stage_layers.empty()) {
    const Index sum = std::accumulate(d.stage_layers.begin(), d.stage_layers.end(), Index{0});
    if (static_cast<Index>(d.stage_layers.size()) != stages || sum != layers) {
      fail("pipeline_layers lists " + number(static_cast<Index>(d.stage_layers.size())) +
           " stages with " + number(sum) + " layers; there are " + number(stages) + " with " +
           number(layers));
    }
    return d.stage_layers;
  }
  std::vector<Index> all(static_cast<std::size_t>(stages), layers / stages);
  // vLLM spares the last stage, which has the head; SGLang begins with it.
  const Index spared = d.engine == Engine::vllm ? 1 : 0;
  for (Index i = 0; i < layers % stages; ++i) {
    ++all[static_cast<std::size_t>(stages - 1 - spared - i)];
  }
  return all;
}

std::vector<Index> experts_of(const Deployment& d, const Share& share, Index layer, Index count,
                              Index groups) {
  const ExpertPlacement& placement = d.experts;
  const Index slots = checked_add(count, placement.redundant, "expert slots");
  const auto explicit_map = placement.slots.find(layer);
  const bool mapped = explicit_map != placement.slots.end();
  const bool even = placement.redundant > 0 || mapped || d.engine == Engine::sglang;
  if (even && slots % share.workers != 0) {
    fail("layer " + number(layer) + " has " + number(slots) + " expert slots (" + number(count) +
         " experts, " + number(placement.redundant) + " redundant), which " +
         number(share.workers) + " expert-parallel workers do not divide");
  }
  std::vector<Index> experts;
  if (mapped) {
    const std::vector<Index>& map = explicit_map->second;
    if (static_cast<Index>(map.size()) != slots) {
      fail("the expert map of layer " + number(layer) + " has " +
           number(static_cast<Index>(map.size())) + " slots; there are " + number(slots));
    }
    std::vector<bool> there(static_cast<std::size_t>(count), false);
    for (const Index expert : map) {
      if (expert >= count) {
        fail("the expert map of layer " + number(layer) + " names expert " + number(expert) +
             "; there are " + number(count));
      }
      there[static_cast<std::size_t>(expert)] = true;
    }
    if (const auto lost = std::find(there.begin(), there.end(), false); lost != there.end()) {
      fail("the expert map of layer " + number(layer) + " has no slot for expert " +
           number(lost - there.begin()));
    }
    const auto mine = map.begin() + slots / share.workers * share.worker;
    return {mine, mine + slots / share.workers};
  }
  if (placement.round_robin && groups > 1 && placement.redundant == 0 && d.engine == Engine::vllm) {
    for (Index expert = share.worker; expert < count; expert += share.workers) {
      experts.push_back(expert);
    }
    return experts;
  }
  const Interval mine = balanced_part(slots, share.workers, share.worker);
  for (Index slot = mine.begin; slot < mine.end; ++slot) {
    experts.push_back(slot % count);
  }
  return experts;
}

}  // namespace m2n::models
