// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What every provider of values checks before it reads.

#include <initializer_list>
#include <string>
#include <string_view>

#include "core/api/values.hpp"

namespace m2n {

/// @throws Error{usage} naming the first option that is not among @p keys, and the keys.
inline void expect_options(std::string_view values, const Options& options,
                           std::initializer_list<std::string_view> keys) {
  for (const auto& option : options) {
    bool known = false;
    std::string choices;
    for (const std::string_view key : keys) {
      known = known || key == option.first;
      choices += (choices.empty() ? "" : ", ") + std::string(key);
    }
    if (!known) {
      throw Error(Errc::usage,
                  "values '" + std::string(values) + "' have no option '" + option.first + "'; " +
                      (choices.empty() ? "they take none" : "the choices are " + choices));
    }
  }
}

/// @throws Error{bad_argument} unless @p box lies in @p tensor, @p strides are as many as its
///         dimensions, and its elements are whole bytes.
inline void expect_readable(const TensorInfo& tensor, const Box& box, const Strides& strides) {
  const auto fail = [&](const std::string& what) {
    throw Error(Errc::bad_argument, "tensor '" + tensor.name + "': " + what);
  };
  if (box.lo.size() != tensor.shape.size() || box.hi.size() != tensor.shape.size() ||
      strides.size() != tensor.shape.size()) {
    fail("box and strides must have " + std::to_string(tensor.shape.size()) + " dimensions, like " +
         to_string(tensor.shape));
  }
  for (std::size_t d = 0; d < box.rank(); ++d) {
    if (box.lo[d] < 0 || box.lo[d] > box.hi[d] || box.hi[d] > tensor.shape[d]) {
      fail("the box " + to_string(box) + " is not inside the shape " + to_string(tensor.shape));
    }
  }
  if (!is_byte_sized(tensor.dtype)) {
    fail(std::string(to_string(tensor.dtype)) +
         " packs several elements into a byte, so no box of it can be read; declare the packed "
         "bytes as u8");
  }
}

}  // namespace m2n
