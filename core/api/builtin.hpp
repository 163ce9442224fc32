// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The registries with everything that was built in. Filled from the Meson tables of the houses.

#include "core/api/plugins.hpp"

namespace m2n {

Registries builtin_registries();

}  // namespace m2n
