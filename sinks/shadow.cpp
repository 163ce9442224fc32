// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Regions land beside the live parameters, which serve the last version until every worker has the
/// next. The exchange copies, so that live addresses never change: a captured graph stays right.

#include "core/api/plugins.hpp"
#include "sinks/host_sink.hpp"

namespace m2n {

void add_sink_shadow(Registries& registries) {
  registries.sinks.add("shadow",
                       "live parameters with a second copy to write: the last version serves on",
                       [](const SinkContext& context) {
                         return sinks::make_host_sink(
                             {.name = "shadow", .may_choose_route = true, .shadow = true}, context);
                       });
}

}  // namespace m2n
