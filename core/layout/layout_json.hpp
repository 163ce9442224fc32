// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The parts of layouts as JSON spells them: in problem files and in canonical layouts alike.
/// Not installed.

#include <vector>

#include "core/io/json_reader.hpp"
#include "core/layout/mesh.hpp"
#include "core/tensor/shape.hpp"

namespace m2n::layout_json {

/// Each throws JsonError{bad_argument} with the value's place.
Dims dims(const JsonReader& value);
Shape shape(const JsonReader& value);
Rank rank(const JsonReader& value);
std::vector<Rank> ranks(const JsonReader& value);
/// {"dims": [..], "start": r} or {"dims": [..], "ranks": [..]}.
Mesh mesh(const JsonReader& value);
std::vector<Placement> placements(const JsonReader& value, std::size_t tensor_rank);
/// [[begin, end], ...]
Box box(const JsonReader& value);
/// The rank that a key of @p object names.
Rank rank_of_key(const JsonReader& object, const std::string& key);

}  // namespace m2n::layout_json
