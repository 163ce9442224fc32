// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A small job for engines: a few parameters of every kind, sources whose weights change every
/// round, sinks, and the oracle.

#include <memory>
#include <string>
#include <vector>

#include "core/api/builtin.hpp"
#include "core/engine/trainer_engine.hpp"
#include "core/engine/worker_engine.hpp"

namespace m2n::testing {

class EngineJob {
 public:
  /// @param space  Where all weights live; on devices in turn.
  EngineJob(Rank trainers, Rank workers, MemorySpace space = MemorySpace::host);

  Rank trainers() const { return trainers_; }
  Rank workers() const { return workers_; }
  Registries& registries() { return registries_; }
  const Registries& registries() const { return registries_; }
  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<Resolution>& resolutions() const { return resolutions_; }
  const TensorValues& values() const { return *values_; }

  std::unique_ptr<WeightSource> source(Rank trainer) const;
  /// @param kind  "inplace", "shadow" or "load_weights".
  std::unique_ptr<WeightSink> sink(Rank worker, const std::string& kind = "inplace") const;

  /// What is wrong with the weights of @p worker as version @p version; empty when nothing is.
  std::string check(WeightSink& sink, Rank worker, std::uint64_t version) const;

  /// Everything but the control client.
  TrainerInit trainer_init(Rank trainer, std::uint16_t port, std::uint64_t epoch) const;

 private:
  MemoryPlace place_of(Rank rank) const { return {space_, static_cast<int>(rank % 2)}; }

  Rank trainers_;
  Rank workers_;
  MemorySpace space_;
  Registries registries_;
  std::vector<ParamSpec> params_;
  std::vector<Resolution> resolutions_;
  std::shared_ptr<const TensorValues> values_;
};

}  // namespace m2n::testing
