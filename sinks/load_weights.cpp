// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Whole tensors arrive on each worker, and the model loads its part of them: the slow way that is
/// always right.

#include "core/api/plugins.hpp"
#include "sinks/host_sink.hpp"

namespace m2n {

void add_sink_load_weights(Registries& registries) {
  registries.sinks.add("load_weights", "whole tensors on every worker, loaded by the model itself",
                       [](const SinkContext& context) {
                         return sinks::make_host_sink(
                             {.name = "load_weights", .route = sinks::Route::fallback}, context);
                       });
}

}  // namespace m2n
