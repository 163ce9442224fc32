// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Weight sinks: where a worker wants its weights.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/model.hpp"
#include "core/api/registry.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

enum class Mode : std::uint8_t {
  direct,    ///< Regions land in live model storage.
  fallback,  ///< The worker receives the full tensor and hands it to load_weights.
};
std::string_view to_string(Mode mode);

/// A sink's decision about one parameter. The layout covers every worker of the deployment.
struct Resolution {
  Mode mode = Mode::direct;
  Side side;
  bool cast = false;   ///< The sink wants another dtype, and agrees to the cast.
  std::string reason;  ///< For a person: why this mode.
  /// Of fallback: tensors that a loader needs at the same time give the same name here.
  std::string together = {};
  /// What lands is changed in place before the commit: live bytes are not the tensor's.
  bool rewritten = false;
};

/// A whole tensor on its way into load_weights.
struct FullTensor {
  std::string_view name;
  DType dtype = DType::f32;
  Shape shape;
  /// Compact, row-major. Valid until a tensor that is not needed together with this one is asked
  /// for; a loader that keeps @p hold longer is refused the next tensor rather than overwritten.
  const std::byte* data = nullptr;
  std::shared_ptr<const void> hold = {};
  MemoryPlace place = {};  ///< Of @p data: WeightSink::place().

  /// For memory_of() and copy_region(); to be read only.
  LocalBuffer buffer() const;
};

/// Full tensors in declared order, made as they are asked for.
class TensorStream {
 public:
  virtual ~TensorStream() = default;
  virtual std::optional<FullTensor> next() = 0;
};

/// A live parameter of a worker, to be looked at.
struct LiveParameter {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;  ///< Local.
  LocalBuffer buffer;
};

/// Weights to run the model with. While a copy of it exists, its bytes stay what they are.
struct ServedWeights {
  std::uint64_t version = 0;
  std::vector<LiveParameter> parameters;  ///< With what is derived from them.
  std::shared_ptr<const void> lease;
};

/// The weights of one worker rank. A round: begin(), then regions land in lend()ed buffers, then
/// load_weights() once if anything fell back, then accept(), and when every worker has accepted
/// commit(); or roll_back().
///
/// - Collective: no; but resolve() gives the same answer on every worker.
/// - Threads: one thread at a time; serve() from any thread, also during a round.
/// - Memory: the sink owns the buffers that it lends; their addresses never change, nor do those of
///   live().
/// - Streams: what a call does to device memory is done when it returns.
/// - Errors: Error{bad_argument} naming parameter and box.
class WeightSink {
 public:
  WeightSink() = default;
  WeightSink(const WeightSink&) = delete;
  WeightSink& operator=(const WeightSink&) = delete;
  virtual ~WeightSink() = default;

  /// Registry name, e.g. "inplace".
  virtual std::string_view name() const noexcept = 0;

  /// Where full tensors are to arrive: the memory that the weights live in.
  virtual MemoryPlace place() const noexcept { return {}; }
  /// Keeps @p tensor up to date with its inputs, from the next commit on. Before resolve().
  virtual void derive(DerivedTensor tensor);
  /// One resolution a parameter, in order. Called once, before a round.
  virtual std::vector<Resolution> resolve(std::span<const ParamSpec> params) = 0;

  /// Zeroes what nobody feeds, and marks the weights as being written.
  /// @param version  Larger than that of every commit before.
  virtual void begin(std::uint64_t version) = 0;
  /// One loan a parameter that resolve() called direct, in order; the others have no slots.
  virtual std::vector<ParamLoan> lend() = 0;
  /// Takes every tensor of @p stream. Sinks without fallback are never called.
  virtual void load_weights(TensorStream& stream) = 0;
  /// Everything of @p version has come: checks it, so that commit() need not fail.
  virtual void accept(std::uint64_t /*version*/) {}
  /// The weights are version @p version from here on.
  virtual void commit(std::uint64_t version) = 0;
  /// The round failed. Weights are the last committed version, or marked invalid.
  virtual void roll_back() noexcept = 0;

  /// Version of the last commit; nothing when there was none, or the weights are invalid.
  virtual std::optional<std::uint64_t> version() const noexcept = 0;
  /// The weights of version(). @throws Error{unavailable} when there is none, or the sink does not
  /// serve.
  virtual ServedWeights serve();
  /// What the worker keeps, for checks and dumps. Empty for a sink that keeps nothing.
  virtual std::vector<LiveParameter> live() = 0;
};

/// What a sink is made from: either models (one a worker) or the sides of a problem file.
struct SinkContext {
  Options options;
  Rank rank = 0;                               ///< In the world.
  Rank first_worker = 0;                       ///< World rank of worker 0.
  std::shared_ptr<const WorkerModels> models;  ///< Null with declared.
  std::vector<Resolution> declared = {};       ///< Of a problem file.
  MemoryPlace place = {};                      ///< Of the memory that the sink takes.
};
using SinkRegistry = Registry<WeightSink, SinkContext>;

}  // namespace m2n
