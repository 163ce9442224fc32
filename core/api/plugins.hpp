// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// All registries together, and plug-ins that fill them from shared libraries.

#include <cstdint>
#include <filesystem>

#include "core/api/model.hpp"
#include "core/api/planner.hpp"
#include "core/api/sink.hpp"
#include "core/api/source.hpp"
#include "core/api/transport.hpp"
#include "core/api/values.hpp"

namespace m2n {

/// One registry an interface. A value; copy it to try something out.
struct Registries {
  PlannerRegistry planners{"planner"};
  TransportRegistry transports{"transport"};
  SourceRegistry sources{"source"};
  SinkRegistry sinks{"sink"};
  ValuesRegistry values{"values"};
  ModelRegistry models{"model"};
};

/// Grows with every change of a header that plug-ins see.
inline constexpr std::uint32_t kInterfaceVersion = 4;

/// Loads @p file and lets it add to @p registries. The library stays loaded until the process ends.
/// It must export, with C linkage, `m2n_plugin_interface_version` (std::uint32_t) and
/// `m2n_plugin_register` (void(m2n::Registries&)); M2N_PLUGIN writes both.
/// @throws Error{usage} when the file cannot be loaded, lacks a symbol, or was built for another
///         interface version.
void load_plugin(const std::filesystem::path& file, Registries& registries);

}  // namespace m2n

/// Defines a plug-in: M2N_PLUGIN(registries) { registries.planners.add(...); }
#define M2N_PLUGIN(registries)                                                \
  extern "C" __attribute__((visibility("default")))                           \
  const std::uint32_t m2n_plugin_interface_version = m2n::kInterfaceVersion;  \
  extern "C" __attribute__((visibility("default"))) void m2n_plugin_register( \
      m2n::Registries& registries)
