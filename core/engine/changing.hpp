// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Weights that change with every version, whatever they were made from: what a training step does,
/// for jobs without a trainer behind them.

#include <cstdint>
#include <memory>

#include "core/api/source.hpp"
#include "core/api/values.hpp"
#include "core/tensor/changes.hpp"

namespace m2n {

/// The values of one version: those of @p base with changed_bits() flipped.
/// @param base  A loan.
std::unique_ptr<TensorValues> make_changed_values(const TensorValues& base, std::uint64_t version);

/// Lends what @p base lends, changed in place before every round.
std::unique_ptr<WeightSource> make_changing_source(std::unique_ptr<WeightSource> base, Rank rank);

}  // namespace m2n
