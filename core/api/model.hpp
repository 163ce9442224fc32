// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Inference models as data: the parameters that a worker really keeps, and what feeds them.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/deployment.hpp"
#include "core/api/registry.hpp"
#include "core/api/values.hpp"
#include "core/layout/mesh.hpp"
#include "core/tensor/view.hpp"

namespace m2n {

/// A box of a checkpoint tensor, and where it lies in a worker's parameter.
struct Section {
  std::string tensor;  ///< Checkpoint name.
  Box box;             ///< Of the checkpoint tensor.
  Index offset = 0;    ///< Element of the local parameter that holds box.lo.
  Strides strides;     ///< In elements, one a dimension of the checkpoint tensor.
};

/// A parameter, read only.
struct ParameterView {
  DType dtype = DType::f32;
  Shape shape;  ///< Local.
  const std::byte* data = nullptr;
};

/// One live parameter of a worker: row-major, contiguous.
struct WorkerParameter {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;                    ///< Local.
  std::vector<Section> sections;  ///< Disjoint in the local parameter.
  std::vector<Box> padding;       ///< Local boxes that nobody feeds; zero after every round.
  bool keep_dtype = false;        ///< A dtype asked for all of the worker does not apply here.
  /// Not kept: what lands here must equal that live parameter when the round ends (the tied head
  /// that a checkpoint repeats). Empty for a parameter like any other.
  std::string same_as = {};
  /// An engine's stock column, row or replicated loader fills it from one tensor, cut evenly.
  bool plain = true;
  /// Why only a loader can fill it; empty when its sections may be written in place.
  std::string loader_only = {};
  /// The form that a kernel wants it in, when that is another than `sections` say: it lives in that
  /// form, and is loaded elsewhere.
  std::string kernel_form = {};
  /// Writes that form, of the same size. Without it a parameter with a kernel_form is refused.
  std::function<void(const ParameterView& loaded, std::byte* live)> to_kernel_form = {};
};

/// What a worker computes from its parameters, and must compute again when they change.
struct DerivedTensor {
  std::string name;
  std::optional<DType> dtype;  ///< Nothing: that of the first input, as it lives.
  Shape shape;
  std::vector<std::string> inputs;  ///< Parameters of the worker.
  /// Writes the tensor, compact and row-major. Without it the inputs cannot be updated.
  std::function<void(std::span<const ParameterView> inputs, std::byte* out)> refresh;
};

/// A parameter, to be changed where it lies.
struct WritableView {
  DType dtype = DType::f32;
  Shape shape;  ///< Local.
  std::byte* data = nullptr;
};

/// What a worker does to parameters in place when a round has brought all of them, and before
/// anything is derived: they no longer hold the checkpoint's bits (weights quantised anew).
struct Rewrite {
  std::vector<std::string> parameters;  ///< Of the worker; each in one rewrite at most.
  std::string change;                   ///< For a person: "quantised anew for one scale".
  /// @param parameters  In the order of the names. @throws Error{bad_argument} for values that
  ///        cannot be: the round fails.
  std::function<void(std::span<const WritableView> parameters)> apply;
};

/// Everything that one worker keeps. Aliases (tied heads) are not listed.
struct WorkerModel {
  std::vector<WorkerParameter> parameters;
  std::vector<std::string> ignored = {};  ///< Checkpoint tensors known, and not needed.
  std::vector<Rewrite> rewrites = {};
  std::vector<DerivedTensor> derived = {};
  /// Why no parameter of this model is filled by a stock loader alone; empty when some are.
  std::string not_plain = {};
  std::uint64_t arrangement = 0;  ///< Version of the expert map that this follows.
};

/// By worker. Workers that keep the same share one.
using WorkerModels = std::vector<std::shared_ptr<const WorkerModel>>;

/// A family of models, for one size of it.
///
/// - Threads: const calls from several threads.
/// - Errors: Error{bad_argument} naming the size that does not divide, and by what it must.
class ModelFamily {
 public:
  ModelFamily() = default;
  ModelFamily(const ModelFamily&) = delete;
  ModelFamily& operator=(const ModelFamily&) = delete;
  virtual ~ModelFamily() = default;

  virtual std::string_view name() const noexcept = 0;
  /// The tensors of a checkpoint of this size, in file order of the layers.
  virtual const Catalogue& catalogue() const = 0;
  /// What worker @p worker keeps, fed by tensors of @p checkpoint (which may leave out tensors that
  /// the model does not need, or hold others that it ignores).
  virtual WorkerModel worker(const Deployment& deployment, Rank worker,
                             const Catalogue& checkpoint) const = 0;
  /// The same for all workers of a deployment; replicas share one.
  virtual WorkerModels workers(const Deployment& deployment, const Catalogue& checkpoint) const;
};

struct ModelContext {
  Options
      options;  ///< "config": a Hugging Face config.json as text; or sizes by their names there.
};
using ModelRegistry = Registry<ModelFamily, ModelContext>;

/// The "model_type" of a config.json, which is the name of its family. @param where  Of the text,
/// for messages. @throws Error{bad_argument} when there is none.
std::string model_type_of(std::string_view config, const std::string& where);

/// @throws Error{bad_argument} naming parameter and box unless sections and padding cover every
///         element of every parameter of @p model exactly once, and sections fit their tensors.
void check_worker_model(const WorkerModel& model, const Catalogue& checkpoint);
/// The same for all of them, each once.
void check_worker_models(const WorkerModels& models, const Catalogue& checkpoint);

}  // namespace m2n
