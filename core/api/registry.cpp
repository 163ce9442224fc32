// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/registry.hpp"

#include <algorithm>

namespace m2n {

void require_known_options(std::string_view who, const Options& options,
                           std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : options) {
    if (std::find(known.begin(), known.end(), key) != known.end()) {
      continue;
    }
    std::string text = std::string(who) + " has no option '" + key + "'; ";
    if (known.size() == 0) {
      throw Error(Errc::usage, text + "it has none");
    }
    text += "the choices are ";
    const char* separator = "";
    for (const std::string_view choice : known) {
      text += separator + std::string(choice);
      separator = ", ";
    }
    throw Error(Errc::usage, text);
  }
}

}  // namespace m2n
