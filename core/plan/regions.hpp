// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Moves of a pattern as regions of memory.

#include <vector>

#include "core/plan/plan.hpp"

namespace m2n {

/// The scales of a pattern's elements, where it quantises.
struct PatternScales {
  std::shared_ptr<const Layout> layout;  ///< At the source.
  Dims blocks;
};

/// Appends what does not depend on the parameter of @p move: regions with slots for buffers, and a
/// stage counted from 0. One region; where elements leave a source to be quantised (@p scales set)
/// one for each part of the box in which scales lie regularly.
void append_regions(const Pattern& pattern, const Move& move, const PatternScales* scales,
                    std::vector<Region>& out);

}  // namespace m2n
