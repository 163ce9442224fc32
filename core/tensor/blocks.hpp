// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Large boxes in parts of bounded size.

#include <algorithm>
#include <cstddef>

#include "core/tensor/shape.hpp"

namespace m2n {

/// Calls @p visit with disjoint parts of @p box, of at most @p most elements (at least one), that
/// cover it: cut along the outer dimensions, in row-major order.
template <class Visit>
void for_each_block(const Box& box, Index most, const Visit& visit, std::size_t dim = 0) {
  if (box.volume() <= most || dim == box.rank()) {
    visit(box);
    return;
  }
  const Index inner = box.volume() / box[dim].size();
  const Index step = std::max<Index>(1, most / inner);
  for (Index begin = box.lo[dim]; begin < box.hi[dim]; begin += step) {
    Box part = box;
    part.lo[dim] = begin;
    part.hi[dim] = std::min(box.hi[dim], begin + step);
    for_each_block(part, most, visit, dim + 1);
  }
}

/// Elements from the one at @p from to the one at @p to.
inline Index element_offset(const Dims& from, const Dims& to, const Strides& strides) {
  Index offset = 0;
  for (std::size_t d = 0; d < from.size(); ++d) {
    offset += (to[d] - from[d]) * strides[d];
  }
  return offset;
}

}  // namespace m2n
