// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/common/agree.hpp"

#include <string>

namespace m2n {

void agree(Group& group, std::string_view phase, const std::optional<Error>& mine,
           Deadline deadline) {
  const auto all = group.all_gather(
      phase, mine ? std::to_string(static_cast<int>(mine->code())) + " " + mine->what() : "",
      deadline);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) {
      const auto space = all[rank].find(' ');
      throw TransportError(static_cast<Errc>(std::stoi(all[rank].substr(0, space))),
                           "rank " + std::to_string(rank) + ": " + all[rank].substr(space + 1));
    }
  }
}

}  // namespace m2n
