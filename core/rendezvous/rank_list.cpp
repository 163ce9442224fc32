// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/rank_list.hpp"

#include <cstddef>

namespace m2n {

std::string list_ranks(std::span<const Rank> ranks) {
  std::string text;
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    if (last - first < 2) {
      last = first;
    }
    text += text.empty() ? "" : ", ";
    text += std::to_string(ranks[first]);
    if (last > first) {
      text += "-" + std::to_string(ranks[last]);
    }
    first = last + 1;
  }
  return text;
}

std::string name_ranks(std::span<const Rank> ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + list_ranks(ranks);
}

}  // namespace m2n
