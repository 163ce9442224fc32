// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Parameters that become f8_e4m3 on their way: where a rank keeps the scales of what it holds.

#include "core/plan/problem.hpp"

namespace m2n {

/// A layout for the scales of a tensor that lies like @p source: on every rank those of its blocks,
/// piece after piece, each compact and row-major, in slot 0.
Layout scales_layout(const Layout& source, const Dims& blocks);

/// @p rank's piece of @p scales that holds all of @p box; null when there is none.
const Piece* scales_piece(const Layout& scales, Rank rank, const Box& box);

/// @throws Error{bad_argument} naming both when @p scales has not one element a block of @p
/// parameter.
void check_scale_shape(const Parameter& parameter, const Parameter& scales);

/// Checks what @p parameter says about its scales, which are @p scales (null: no such parameter):
/// their type and shape, and that every rank of the source holds whole blocks, room for exactly
/// their scales, and no others.
/// @throws Error{bad_argument} naming the parameter, the rank and the box.
void check_quantised(const Parameter& parameter, const Parameter* scales);

}  // namespace m2n
