// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The oracle: compares destination memory with the values that belong there, element by element,
/// whatever the plan said.

#include <cstdint>
#include <string>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/sink.hpp"
#include "core/api/values.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// What a comparison found.
struct Comparison {
  std::uint64_t elements = 0;  ///< Compared.
  std::uint64_t wrong = 0;
  std::string first;  ///< Describes the first wrong element; empty when there is none.

  bool ok() const noexcept { return wrong == 0; }
  void add(const Comparison& other);
};

/// Compares every piece of @p rank's destination side, cast as the problem says.
/// @param resolutions  Where given, parameters that fell back are left out: see verify_full().
Comparison verify_pieces(const Problem& problem, Rank rank, const std::vector<LocalBuffer>& buffers,
                         const TensorValues& values,
                         const std::vector<Resolution>& resolutions = {});

/// Compares a full tensor on its way into load_weights.
Comparison verify_full(Rank rank, const FullTensor& tensor, const TensorValues& values);

/// Compares every element of a worker's live parameters with its sections, and the padding with 0.
Comparison verify_model(const WorkerModel& model, Rank rank, const std::vector<LiveParameter>& live,
                        const TensorValues& values);

}  // namespace m2n
