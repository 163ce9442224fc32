// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Regions land in the live parameters; while a round runs, and after it failed, they are invalid.

#include "core/api/plugins.hpp"
#include "sinks/host_sink.hpp"

namespace m2n {

void add_sink_inplace(Registries& registries) {
  registries.sinks.add("inplace", "live parameters, written in place; invalid while a round runs",
                       [](const SinkContext& context) {
                         return sinks::make_host_sink({.name = "inplace", .may_choose_route = true},
                                                      context);
                       });
}

}  // namespace m2n
