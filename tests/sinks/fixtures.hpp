// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Checkpoints in memory, and a loader that knows the rules of each parameter and goes element by
/// element: the oracle of the sinks' tests.

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/error.hpp"

namespace m2n::testing {

/// The sinks and models of this folder's house.
Registries house_registries();

/// Whole tensors by name.
struct Checkpoint {
  Catalogue catalogue;
  std::map<std::string, std::vector<std::byte>> bytes;

  const TensorInfo& info(const std::string& name) const;
};

/// Every element of every tensor has its own bits, as far as its type has enough of them; other
/// @p round, other bits.
Checkpoint make_checkpoint(const Catalogue& catalogue, int round = 0);

std::vector<ParamSpec> specs_of(const Catalogue& catalogue);

using Models = std::vector<WorkerModel>;
/// As sinks want them.
std::shared_ptr<const WorkerModels> each_shared(const std::shared_ptr<const Models>& models);
std::shared_ptr<const Models> models_of(const ModelFamily& family, Rank workers, Index tp,
                                        const Catalogue& checkpoint);

/// World rank of worker 0, unless a test says otherwise.
inline constexpr Rank kFirstWorker = 3;

std::unique_ptr<ModelFamily> make_model(const std::string& name, const Options& options);
std::unique_ptr<WeightSink> make_sink(const std::string& name,
                                      const std::shared_ptr<const Models>& models, Rank worker,
                                      const Options& options = {},
                                      Rank first_worker = kFirstWorker);

/// Runs one round: regions of direct parameters element by element, the others as full tensors.
void run_round(WeightSink& sink, const std::vector<Resolution>& resolutions, Rank rank,
               const Checkpoint& checkpoint, std::uint64_t version);

/// Only writes the direct regions, as a transport would, of the first @p count tensors.
void write_direct(WeightSink& sink, const std::vector<Resolution>& resolutions, Rank rank,
                  const Checkpoint& checkpoint,
                  std::size_t count = std::numeric_limits<std::size_t>::max());

/// Streams the tensors that fell back.
class CheckpointStream final : public TensorStream {
 public:
  CheckpointStream(const Checkpoint& checkpoint, std::vector<std::string> names)
      : checkpoint_(checkpoint), names_(std::move(names)) {}
  std::optional<FullTensor> next() override;

 private:
  const Checkpoint& checkpoint_;
  std::vector<std::string> names_;
  std::size_t at_ = 0;
};

std::vector<std::string> fallback_names(const std::vector<Resolution>& resolutions,
                                        const Catalogue& catalogue);

/// Live bytes by parameter.
std::map<std::string, std::vector<std::byte>> live_bytes(WeightSink& sink);

/// For each element of @p parameter the origin: "<tensor>[i,j]", or "0" for padding; every element
/// is visited, and one without or with two origins is an error.
std::vector<std::string> origins(const WorkerParameter& parameter, const Catalogue& checkpoint);

const WorkerParameter& parameter_of(const WorkerModel& model, const std::string& name);

/// Calls @p action and gives back what it threw; empty when it did not.
struct Thrown {
  bool any = false;
  Errc code = Errc::usage;
  std::string text;
  bool mentions(const std::string& part) const { return text.find(part) != std::string::npos; }
};
Thrown thrown_by(const std::function<void()>& action);

}  // namespace m2n::testing
