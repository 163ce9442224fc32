// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Weight sources: how a trainer holds its weights.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/registry.hpp"
#include "core/api/values.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// The weights of one trainer rank.
///
/// - Collective: no; but params() is the same on every rank.
/// - Threads: one thread at a time.
/// - Memory: the source owns the buffers that it lends; host or device.
/// - Streams: work that writes the weights is complete when borrow() returns.
/// - Errors: Error{bad_argument} naming parameter and rank.
class WeightSource {
 public:
  WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;
  virtual ~WeightSource() = default;

  /// Registry name, e.g. "fsdp".
  virtual std::string_view name() const noexcept = 0;

  /// Every parameter with its layout over all trainer ranks, in the order in which it is sent.
  virtual const std::vector<ParamSpec>& params() const = 0;

  /// Lends this rank's local buffers, in the order of params(). The loan ends with the next call
  /// of borrow() or with the source; until then the trainer does not write to them, and between
  /// rounds their addresses do not change.
  /// @param version  Of the round that the weights are for.
  virtual std::vector<ParamLoan> borrow(std::uint64_t version) = 0;
};

/// What a source is made from.
struct SourceContext {
  Options options;
  Rank rank = 0;                               ///< Of this trainer.
  Rank ranks = 1;                              ///< Trainer ranks [0, ranks).
  std::shared_ptr<const TensorValues> values;  ///< Catalogue and values; a loan for the source.
  std::vector<ParamSpec> declared = {};        ///< Of a problem file; empty otherwise.
  MemoryPlace place = {};                      ///< Of the memory that the source takes.
};
using SourceRegistry = Registry<WeightSource, SourceContext>;

}  // namespace m2n
