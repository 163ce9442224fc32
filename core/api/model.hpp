// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Inference models as data: the parameters that a worker really keeps, and what feeds them.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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
};

/// Everything that one worker keeps. Aliases (tied heads) are not listed.
struct WorkerModel {
  std::vector<WorkerParameter> parameters;
  std::vector<std::string> ignored = {};  ///< Checkpoint tensors known, and not needed.
};

/// How a deployment of workers shares a model. Worker w of tensor * ... has tensor-parallel rank
/// w mod tensor, and data-parallel replica w div tensor.
struct Deployment {
  Rank workers = 1;
  Index tensor_parallel = 1;
};

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
};

struct ModelContext {
  Options
      options;  ///< "config": a Hugging Face config.json as text; or sizes by their names there.
};
using ModelRegistry = Registry<ModelFamily, ModelContext>;

/// @throws Error{bad_argument} naming parameter and box unless sections and padding cover every
///         element of every parameter of @p model exactly once, and sections fit their tensors.
void check_worker_model(const WorkerModel& model, const Catalogue& checkpoint);

}  // namespace m2n
