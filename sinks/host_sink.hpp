// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Live parameters in host or device memory: what the sinks inplace, shadow, load_weights and null
/// share.

#include <memory>
#include <string>

#include "core/api/sink.hpp"
#include "sinks/destinations.hpp"

namespace m2n::sinks {

/// What tells these sinks apart.
struct HostSinkKind {
  std::string name;
  Route route = Route::fused;
  bool may_choose_route = false;  ///< Option "direct": "fused" (default) or "strict".
  bool keeps = true;              ///< live() and serve() show the parameters.
  bool shadow = false;            ///< The last version serves until the next is committed.
};

/// Options of every kind: "cast" ("exact" by default, or "nearest_even"), "drain" (seconds that a
/// round waits for readers of the weights) and, with models, "dtype", for all floating-point
/// parameters that do not keep their own, and "dtypes", rules by parameter: see DtypePolicy.
/// @throws Error{usage} for an unknown option or value.
std::unique_ptr<WeightSink> make_host_sink(HostSinkKind kind, const SinkContext& context);

}  // namespace m2n::sinks
