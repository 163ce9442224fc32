// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From what sources declare and sinks resolve to a problem, and from what they lend to buffers.

#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/sink.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// The problem between a source's parameters and a sink's resolutions, in the source's order.
/// @throws Error{bad_argument} when the counts differ, and all of Problem::make().
Problem make_problem(const std::vector<ParamSpec>& params,
                     const std::vector<Resolution>& resolutions);

/// Checks what a source lends on @p rank against the problem, and numbers it.
/// @throws Error{bad_argument} naming the first parameter that differs in name, dtype, shape,
///         number of buffers, or has a buffer that is too small.
std::vector<LocalBuffer> bind_source(const Problem& problem, Rank rank,
                                     const std::vector<ParamLoan>& loans);

/// Checks what a sink lends on @p rank, and numbers it together with the full tensors.
/// @param full_tensors  By parameter: where those that fell back arrive on this rank. Empty when
///                      none does.
std::vector<LocalBuffer> bind_destination(const Problem& problem, Rank rank,
                                          const std::vector<Resolution>& resolutions,
                                          const std::vector<ParamLoan>& loans,
                                          const std::vector<LocalBuffer>& full_tensors);

}  // namespace m2n
