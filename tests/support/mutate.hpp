// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Bytes as nobody should send them.

#include <algorithm>
#include <cstddef>
#include <string>

#include "tests/support/random_problem.hpp"

namespace m2n::testing {

inline std::string random_bytes(Dice& dice, std::uint64_t most) {
  std::string bytes(dice.below(most + 1), '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(dice.below(256));
  }
  return bytes;
}

/// @p bytes with one to four faults: a bit or a byte changed, bytes cut off, put in or repeated.
inline std::string mutate(Dice& dice, std::string bytes) {
  for (std::uint64_t faults = 1 + dice.below(4); faults > 0; --faults) {
    if (bytes.empty()) {
      return random_bytes(dice, 8);
    }
    const std::size_t at = dice.below(bytes.size());
    switch (dice.below(6)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << dice.below(8)));
        break;
      case 1:
        bytes[at] = "\x00\xff\x7f\x80\x01"[dice.below(5)];
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(at, random_bytes(dice, 16));
        break;
      case 4:
        bytes.erase(at, 1 + dice.below(16));
        break;
      default:
        bytes.insert(at, bytes.substr(dice.below(bytes.size()), 1 + dice.below(64)));
    }
  }
  return bytes;
}

}  // namespace m2n::testing
