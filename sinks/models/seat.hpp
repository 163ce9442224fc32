// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One worker's seat in its deployment: what it keeps of layers, experts and dimensions.

#include <string>
#include <vector>

#include "core/api/deployment.hpp"

namespace m2n::models {

/// One of several workers that cut a dimension among them.
struct Share {
  Index workers = 1;
  Index worker = 0;
};

struct Seat {
  Share attention;  ///< Also of embedding and head.
  Share dense;      ///< Other linear layers, shared experts included.
  Share inside;     ///< Of each expert.
  Share experts;    ///< Of the list of experts.
  Share stages;     ///< Of the layers.
};

/// @throws Error{bad_argument} naming the numbers that do not fit, and what would.
Seat seat_of(const Deployment& deployment, Rank worker);

/// Layers of each stage. @throws Error{bad_argument} unless deployment.stage_layers add up.
std::vector<Index> layers_of_stages(const Deployment& deployment, Index layers);

/// Experts of a layer on expert-parallel rank @p experts.worker, slot by slot.
/// @param groups  Of experts, in the model: round-robin placement needs more than one.
/// @throws Error{bad_argument} naming layer and numbers when slots and ranks do not fit.
std::vector<Index> experts_of(const Deployment& deployment, const Share& experts, Index layer,
                              Index count, Index groups);

}  // namespace m2n::models
