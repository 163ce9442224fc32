// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Live parameters in host memory: what the sinks inplace, load_weights and null share.

#include <memory>
#include <string>

#include "core/api/sink.hpp"
#include "sinks/destinations.hpp"

namespace m2n::sinks {

/// What tells the host sinks apart.
struct HostSinkKind {
  std::string name;
  Route route = Route::fused;
  bool may_choose_route = false;  ///< Option "direct": "fused" (default) or "strict".
  bool keeps = true;              ///< live() shows the parameters.
};

/// Options of every kind: "cast" ("exact" by default, or "nearest_even") and, with models,
/// "dtype", for all floating-point parameters that do not keep their own.
/// @throws Error{usage} for an unknown option or value.
std::unique_ptr<WeightSink> make_host_sink(HostSinkKind kind, const SinkContext& context);

}  // namespace m2n::sinks
