// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Ranks in sentences.

#include <span>
#include <string>

#include "core/layout/mesh.hpp"

namespace m2n {

/// "2, 5, 7-9": @p ranks ascending and without repeats, with runs of three or more joined.
std::string list_ranks(std::span<const Rank> ranks);

/// "rank 2" or "ranks 2, 5".
std::string name_ranks(std::span<const Rank> ranks);

}  // namespace m2n
