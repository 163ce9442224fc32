// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Lets Boost.Test print what it compares.

#include <ostream>

#include "core/tensor/shape.hpp"

namespace m2n {

inline std::ostream& operator<<(std::ostream& os, const Dims& dims) {
  return os << to_string(dims);
}
inline std::ostream& operator<<(std::ostream& os, const Box& box) { return os << to_string(box); }

}  // namespace m2n
