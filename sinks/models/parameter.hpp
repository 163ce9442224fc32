// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From a row of a family's table to one worker's parameter: its sections and padding.

#include <functional>
#include <string>
#include <vector>

#include "core/api/values.hpp"
#include "sinks/models/family.hpp"

namespace m2n::models {

/// What a worker's parameter is made from.
struct Making {
  const Row& row;
  std::string name;          ///< Of the parameter.
  std::string model;         ///< Family, for messages.
  Share share;               ///< Of the dimension that is cut.
  std::vector<Index> slots;  ///< Experts, slot by slot; of Experts::none one slot, expert 0.
  Index vocab_padding = 1;
  /// The tensor that a part's name stands for, in the checkpoint.
  std::function<const TensorInfo&(const Part& part, Index expert)> tensor;
};

struct Made {
  WorkerParameter parameter;
  std::vector<Index> rooms;  ///< Of each part, along the dimension that is cut, in dimension 0
                             ///< where none is.
  Index block = 1;  ///< Of scales: of how many elements along the dimension that is cut there is
                    ///< one. Smaller than the table's where a cut inside its blocks repeats scales.
};

/// @throws Error{bad_argument} naming the size that does not divide, and by what it must.
Made make_parameter(const Making& making);

/// The shape of a part's tensor in a checkpoint.
Shape tensor_shape(const Part& part);

}  // namespace m2n::models
