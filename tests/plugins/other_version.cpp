// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A plug-in of the next interface version: to be refused before it runs.

#include <cstdlib>

#include "core/api/plugins.hpp"

// NOLINTNEXTLINE(readability-identifier-naming): the name that a loader looks for.
extern "C" const std::uint32_t m2n_plugin_interface_version = m2n::kInterfaceVersion + 1;
extern "C" void m2n_plugin_register(m2n::Registries& /*registries*/) { std::abort(); }
