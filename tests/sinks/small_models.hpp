// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Sizes of small models that keep what is awkward: fewer key heads than workers, a head size of
/// their own, a vocabulary and experts that do not divide.

#include "core/api/registry.hpp"

namespace m2n::testing {

/// @p more wins.
Options small_decoder(Options more = {});
/// Latent attention and six experts.
Options small_mla(Options more = {});
/// f8 with a scale a block of 4 x 4.
Options with_small_blocks(Options options);

}  // namespace m2n::testing
