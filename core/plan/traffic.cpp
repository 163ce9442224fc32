// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/traffic.hpp"

#include <algorithm>
#include <limits>
#include <map>

namespace m2n {
namespace {

std::vector<Rank> holding_ranks(const Pattern& pattern) {
  std::vector<Rank> ranks;
  ranks.reserve(pattern.geometry.source_count() + pattern.geometry.destination_count() +
                pattern.scratch.size());
  for (const RankPiece& entry : pattern.geometry.source->pieces()) {
    ranks.push_back(entry.rank);
  }
  for (const RankPiece& entry : pattern.geometry.destination->pieces()) {
    ranks.push_back(entry.rank);
  }
  for (const ScratchPiece& piece : pattern.scratch) {
    ranks.push_back(piece.rank);
  }
  return ranks;
}

}  // namespace

TrafficMatrix traffic_matrix(const Plan& plan, const Problem& problem) {
  const auto world = static_cast<Eigen::Index>(problem.world_size());
  TrafficMatrix traffic = TrafficMatrix::Zero(world, world);
  std::vector<std::uint64_t> parameters(plan.patterns.size(), 0);
  for (const std::uint32_t pattern : plan.pattern_of) {
    ++parameters[pattern];
  }
  for (std::size_t p = 0; p < plan.patterns.size(); ++p) {
    const Pattern& pattern = plan.patterns[p];
    const std::vector<Rank> ranks = holding_ranks(pattern);
    const std::uint64_t item = bytes_of(pattern.geometry.destination->dtype());
    std::vector<std::uint64_t> bytes;
    bytes.reserve(pattern.boxes.size());
    for (const Box& box : pattern.boxes) {
      bytes.push_back(static_cast<std::uint64_t>(box.volume()) * item * parameters[p]);
    }
    for (const Move& move : pattern.moves) {
      std::uint64_t& sum = traffic(ranks[move.from], ranks[move.to]);
      sum = checked_add_bytes(sum, bytes[move.box]);
    }
  }
  return traffic;
}

std::vector<StageUsage> usage_of(const Plan& plan, const Problem& problem, Rank rank) {
  // Of each pattern, what the rank does by stage; scratch is in use from the first write of a piece
  // to its last read.
  struct Own {
    std::vector<StageUsage> stages;
    struct Life {
      std::uint32_t first;
      std::uint32_t last;
      std::uint64_t bytes;
    };
    std::vector<Life> scratch;
  };
  std::vector<Own> own(plan.patterns.size());
  for (std::size_t p = 0; p < plan.patterns.size(); ++p) {
    const Pattern& pattern = plan.patterns[p];
    const std::vector<Rank> ranks = holding_ranks(pattern);
    const std::uint32_t first_scratch =
        pattern.geometry.source_count() + pattern.geometry.destination_count();
    std::map<std::uint32_t, StageUsage> by_stage;
    std::map<std::uint32_t, Own::Life> lives;
    for (const Move& move : pattern.moves) {
      const bool sends = ranks[move.from] == rank;
      const bool receives = ranks[move.to] == rank;
      if (!sends && !receives) {
        continue;
      }
      StageUsage& usage = by_stage[move.stage];
      usage.stage = move.stage;
      const std::uint64_t bytes = pattern.move_bytes(move);
      if (sends && receives) {
        usage.copied_bytes += bytes;
      } else if (sends) {
        usage.sent_bytes += bytes;
      } else {
        usage.received_bytes += bytes;
      }
      for (const auto& [mine, holding] :
           {std::pair(sends, move.from), std::pair(receives, move.to)}) {
        if (mine && holding >= first_scratch) {
          const std::uint64_t size = static_cast<std::uint64_t>(pattern.box_of(holding).volume()) *
                                     bytes_of(pattern.geometry.destination->dtype());
          Own::Life& life =
              lives.try_emplace(holding, Own::Life{move.stage, move.stage, size}).first->second;
          life.first = std::min(life.first, move.stage);
          life.last = std::max(life.last, move.stage);
        }
      }
    }
    for (const auto& [stage, usage] : by_stage) {
      own[p].stages.push_back(usage);
    }
    for (const auto& [holding, life] : lives) {
      own[p].scratch.push_back(life);
    }
  }
  std::map<std::uint32_t, StageUsage> total;
  std::map<std::uint32_t, std::int64_t> scratch_change;
  for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
    const std::uint32_t first = plan.first_stage[i];
    const Own& pattern = own[plan.pattern_of[i]];
    for (const StageUsage& usage : pattern.stages) {
      StageUsage& sum = total[first + usage.stage];
      sum.stage = first + usage.stage;
      sum.sent_bytes += usage.sent_bytes;
      sum.received_bytes += usage.received_bytes;
      sum.copied_bytes += usage.copied_bytes;
    }
    for (const Own::Life& life : pattern.scratch) {
      scratch_change[first + life.first] += static_cast<std::int64_t>(life.bytes);
      scratch_change[first + life.last + 1] -= static_cast<std::int64_t>(life.bytes);
    }
  }
  std::vector<StageUsage> usages;
  std::int64_t in_use = 0;
  auto change = scratch_change.begin();
  for (const auto& [stage, usage] : total) {
    while (change != scratch_change.end() && change->first <= stage) {
      in_use += (change++)->second;
    }
    usages.push_back(usage);
    usages.back().scratch_bytes = static_cast<std::uint64_t>(in_use);
  }
  return usages;
}

}  // namespace m2n
