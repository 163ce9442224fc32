// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From what sources declare and sinks resolve to a problem, and from what they lend to buffers.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/sink.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// The problem between a source's parameters and a sink's resolutions, in the source's order.
/// @throws Error{bad_argument} when the counts differ, and all of Problem::make().
Problem make_problem(const std::vector<ParamSpec>& params,
                     const std::vector<Resolution>& resolutions);

/// Checks what a source lends on @p rank against the problem, and numbers it.
/// @throws Error{bad_argument} naming the first parameter that differs in name, dtype, shape,
///         number of buffers, or has a buffer that is too small.
std::vector<LocalBuffer> bind_source(const Problem& problem, Rank rank,
                                     const std::vector<ParamLoan>& loans);

/// Full tensors of the parameters that a worker cannot take in place, on one worker.
class FallbackTensors final {
 public:
  FallbackTensors(const Problem& problem, const std::vector<Resolution>& resolutions, Rank rank);

  bool empty() const noexcept { return tensors_.empty(); }
  /// Stream of all of them, in declared order. The tensors must outlive it.
  std::unique_ptr<TensorStream> stream() const;
  /// The buffer of parameter @p index, which must have fallen back.
  LocalBuffer buffer(std::size_t index);

 private:
  struct Tensor {
    std::size_t parameter = 0;
    FullTensor view;
    std::vector<std::byte> bytes;
  };
  std::vector<Tensor> tensors_;
};

/// Checks what a sink lends on @p rank, and numbers it together with the full tensors.
std::vector<LocalBuffer> bind_destination(const Problem& problem, Rank rank,
                                          const std::vector<Resolution>& resolutions,
                                          const std::vector<ParamLoan>& loans,
                                          FallbackTensors& fallback);

}  // namespace m2n
