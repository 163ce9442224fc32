// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Buffers to land in, and nothing to look at afterwards: for measuring.

#include "core/api/plugins.hpp"
#include "sinks/host_sink.hpp"

namespace m2n {

void add_sink_null(Registries& registries) {
  registries.sinks.add("null", "buffers to land in, nothing kept", [](const SinkContext& context) {
    return sinks::make_host_sink({.name = "null", .may_choose_route = true, .keeps = false},
                                 context);
  });
}

}  // namespace m2n
