// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Where each checkpoint tensor goes in the parameters of all workers.

#include <span>
#include <vector>

#include "core/api/sink.hpp"
#include "sinks/dtypes.hpp"

namespace m2n::sinks {

/// Which tensors go straight into place.
enum class Route : std::uint8_t {
  fused,     ///< All.
  strict,    ///< Those that fill a parameter of their name and dtype as a stock loader would.
  fallback,  ///< None.
};

/// One entry a declared parameter.
struct Destinations {
  std::vector<Resolution> resolutions;
  /// The places themselves, whatever the mode: for a direct parameter those of its resolution.
  std::vector<Side> places;
};

/// What comes to the workers of @p params: those that are quantised, as f8_e4m3. With @p declared,
/// only where that is what is wanted.
std::vector<ParamSpec> arriving(std::span<const ParamSpec> params,
                                const std::vector<Resolution>* declared);

/// Places by worker models. Equal geometries share one layout.
/// @throws Error{bad_argument} when a model needs a tensor that is not in @p params, when no model
///         knows a tensor, or when dtypes differ and may not.
Destinations destinations_of_models(const WorkerModels& models, Rank first_worker,
                                    std::span<const ParamSpec> params, const DtypePolicy& dtypes,
                                    Route route);

/// Places as a problem file declares them.
Destinations destinations_of_declared(const std::vector<Resolution>& declared,
                                      std::span<const ParamSpec> params, const DtypePolicy& dtypes,
                                      Route route);

}  // namespace m2n::sinks
