// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/world_group.hpp"

#include "core/error.hpp"
#include "core/rendezvous/rank_list.hpp"

namespace m2n {

std::string explain(std::string_view phase, const Verdict& verdict) {
  std::string failures;
  std::string values;
  for (const Verdict::Side& side : verdict.sides) {
    const std::string ranks = name_ranks(side.ranks);
    if (side.statement.failed) {
      failures += (failures.empty() ? "" : "; ") + ranks + ": " + side.statement.text;
    } else {
      values += (values.empty() ? "" : ", ") + ranks + (side.ranks.size() == 1 ? " has" : " have") +
                " '" + side.statement.text + "'";
    }
  }
  if (!verdict.others.empty()) {
    values += (values.empty() ? "" : ", ") + name_ranks(verdict.others) + " differ again";
  }
  // What the others have matters only when nobody failed.
  return "phase '" + std::string(phase) + "': " + (failures.empty() ? values : failures);
}

void require_agreement(WorldGroup& group, std::string_view phase, const Statement& statement,
                       Deadline deadline) {
  const Verdict verdict = group.agree(phase, statement, deadline);
  if (!verdict.unanimous()) {
    throw Error(Errc::bad_argument, explain(phase, verdict));
  }
}

}  // namespace m2n
