// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/plan/regions.hpp"

namespace m2n {

Rank Pattern::rank_of(std::uint32_t holding) const {
  const std::uint32_t sources = geometry.source_count();
  if (holding < sources) {
    return geometry.source->piece_ranks()[holding];
  }
  const std::uint32_t destinations = geometry.destination_count();
  if (holding < sources + destinations) {
    return geometry.destination->piece_ranks()[holding - sources];
  }
  return scratch[holding - sources - destinations].rank;
}

std::vector<bool> Pattern::holdings_of(Rank rank) const {
  const std::size_t holdings =
      geometry.source_count() + geometry.destination_count() + scratch.size();
  std::vector<bool> held;
  held.reserve(holdings);
  for (std::uint32_t holding = 0; holding < holdings; ++holding) {
    held.push_back(rank_of(holding) == rank);
  }
  return held;
}

Role Pattern::role_of(std::uint32_t holding) const {
  const std::uint32_t sources = geometry.source_count();
  if (holding < sources) {
    return Role::source;
  }
  return holding < sources + geometry.destination_count() ? Role::destination : Role::scratch;
}

const Box& Pattern::box_of(std::uint32_t holding) const {
  const std::uint32_t sources = geometry.source_count();
  if (holding < sources) {
    return geometry.source->pieces()[holding].piece.box;
  }
  const std::uint32_t destinations = geometry.destination_count();
  if (holding < sources + destinations) {
    return geometry.destination->pieces()[holding - sources].piece.box;
  }
  return scratch[holding - sources - destinations].box;
}

std::uint64_t Pattern::move_bytes(const Move& move) const {
  return static_cast<std::uint64_t>(boxes[move.box].volume()) *
         bytes_of(geometry.destination->dtype());
}

namespace {

void set_buffer(Endpoint& end, const Problem& problem, std::uint32_t parameter) {
  if (end.role != Role::scratch) {
    end.buffer = problem.buffers(end.role).of_parameter[parameter][end.buffer];
  }
}

bool contiguous(const StridedCopy& copy) {
  return copy.extents.empty() || (copy.extents.size() == 1 && copy.source_strides[0] == 1 &&
                                  copy.destination_strides[0] == 1);
}

std::uint64_t from_bytes(const Region& region) {
  return static_cast<std::uint64_t>(element_count(region.copy.extents)) *
         region.copy.source_item_bytes();
}

/// Extends @p last by @p next when they follow one another on both sides.
bool merge(Region& last, const Region& next) {
  const auto same_place = [](const Endpoint& a, const Endpoint& b) {
    return a.rank == b.rank && a.role == b.role && a.buffer == b.buffer;
  };
  if (next.copy.quantises() || last.stage != next.stage || !same_place(last.from, next.from) ||
      !same_place(last.to, next.to) || last.copy.source_dtype != next.copy.source_dtype ||
      last.copy.destination_dtype != next.copy.destination_dtype || !contiguous(last.copy) ||
      !contiguous(next.copy) ||
      last.from.offset_bytes + from_bytes(last) != next.from.offset_bytes ||
      last.to.offset_bytes + last.bytes != next.to.offset_bytes) {
    return false;
  }
  last.copy.extents = {element_count(last.copy.extents) + element_count(next.copy.extents)};
  last.copy.source_strides = {1};
  last.copy.destination_strides = {1};
  last.bytes += next.bytes;
  return true;
}

/// A region that is still to be written out: whose parameter's, and which of its pattern's.
struct PendingRegion {
  std::uint32_t parameter = 0;
  std::uint32_t number = 0;
};

/// Regions in parameter order, to be taken out by stage, then peer, then in that same order. Cost:
/// linear, but for the logarithm of the distinct pairs of stage and peer.
class PendingRegions {
 public:
  void add(std::uint32_t stage, Rank peer, const PendingRegion& region) {
    const std::uint64_t key = std::uint64_t{stage} << 32 | static_cast<std::uint32_t>(peer);
    if (runs_.empty() || key != last_key_) {
      const auto [at, added] = run_of_.try_emplace(key, runs_.size());
      if (added) {
        runs_.push_back({key, 0});
      }
      last_key_ = key;
      last_run_ = static_cast<std::uint32_t>(at->second);
    }
    ++runs_[last_run_].count;
    regions_.push_back(region);
    run_of_region_.push_back(last_run_);
  }

  std::vector<PendingRegion> take() && {
    std::vector<std::uint32_t> order(runs_.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return runs_[a].key < runs_[b].key; });
    std::vector<std::size_t> next(runs_.size());
    std::size_t begin = 0;
    for (const std::uint32_t run : order) {
      next[run] = begin;
      begin += runs_[run].count;
    }
    std::vector<PendingRegion> out(regions_.size());
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      out[next[run_of_region_[i]]++] = regions_[i];
    }
    return out;
  }

 private:
  struct Run {
    std::uint64_t key = 0;  // stage, peer
    std::size_t count = 0;
  };
  std::vector<Run> runs_;
  std::unordered_map<std::uint64_t, std::size_t> run_of_;
  std::uint64_t last_key_ = 0;
  std::uint32_t last_run_ = 0;
  std::vector<PendingRegion> regions_;
  std::vector<std::uint32_t> run_of_region_;
};

/// The regions of one rank, made once for all parameters that share them: those that follow a
/// pattern, and whose scales lie alike where it quantises.
class OwnRegions {
 public:
  OwnRegions(const Plan& plan, const Problem& problem, Rank rank) {
    constexpr auto kNone = ~std::uint32_t{0};
    std::vector<std::uint32_t> plain(plan.patterns.size(), kNone);  // lists without scales
    std::map<std::tuple<std::uint32_t, const Layout*, Dims>, std::uint32_t> scaled;
    list_of_.reserve(plan.pattern_of.size());
    for (std::uint32_t i = 0; i < plan.pattern_of.size(); ++i) {
      const std::uint32_t number = plan.pattern_of[i];
      PatternScales scales;
      std::uint32_t* list = &plain[number];
      if (const auto holder = problem.scales_of(i)) {
        scales.layout = problem.parameters()[*holder].source.layout;
        scales.blocks = problem.parameters()[i].quantise->blocks;
        list =
            &scaled.try_emplace({number, scales.layout.get(), scales.blocks}, kNone).first->second;
      }
      if (*list == kNone) {
        *list = static_cast<std::uint32_t>(lists_.size());
        lists_.emplace_back();
        append(plan.patterns[number], rank, scales.layout ? &scales : nullptr);
      }
      list_of_.push_back(*list);
    }
  }

  const std::vector<Region>& of(std::uint32_t parameter) const {
    return lists_[list_of_[parameter]];
  }

 private:
  void append(const Pattern& pattern, Rank rank, const PatternScales* scales) {
    const std::vector<bool> held = pattern.holdings_of(rank);
    for (const Move& move : pattern.moves) {
      if (held[move.from] || held[move.to]) {
        append_regions(pattern, move, scales, lists_.back());
      }
    }
  }

  std::vector<std::vector<Region>> lists_;
  std::vector<std::uint32_t> list_of_;  // [parameter]
};

}  // namespace

Program make_program(const Plan& plan, const Problem& problem, Rank rank) {
  Program program;
  program.rank = rank;
  program.world_size = problem.world_size();
  program.stage_count = plan.stage_count;
  program.plan_digest = plan.digest;
  program.problem = &problem;
  program.parameters.resize(plan.pattern_of.size());
  std::iota(program.parameters.begin(), program.parameters.end(), 0U);

  const OwnRegions own(plan, problem, rank);
  for (const Pattern& pattern : plan.patterns) {
    for (const ScratchPiece& piece : pattern.scratch) {
      if (piece.rank == rank) {
        const std::uint64_t bytes =
            checked_mul_bytes(static_cast<std::uint64_t>(piece.box.volume()),
                              bytes_of(pattern.geometry.destination->dtype()), "scratch bytes");
        program.scratch_bytes =
            std::max(program.scratch_bytes, checked_add_bytes(piece.offset_bytes, bytes));
      }
    }
  }
  // Small entries are put in order; each region is written once, in its place.
  PendingRegions sends;
  PendingRegions receives;
  PendingRegions copies;
  for (std::size_t i = 0; i < plan.pattern_of.size(); ++i) {
    const auto parameter = static_cast<std::uint32_t>(i);
    const std::vector<Region>& regions = own.of(parameter);
    for (std::uint32_t number = 0; number < regions.size(); ++number) {
      const Region& region = regions[number];
      const bool sent = region.from.rank == rank;
      const bool received = region.to.rank == rank;
      (sent && received ? copies
       : sent           ? sends
                        : receives)
          .add(plan.first_stage[i] + region.stage, sent ? region.to.rank : region.from.rank,
               {parameter, number});
    }
  }
  // Both ends of a pair see the same sequence, so they merge neighbours alike.
  const auto write_out = [&](PendingRegions& pending, std::vector<Region>& out) {
    const std::vector<PendingRegion> entries = std::move(pending).take();
    out.reserve(entries.size());
    for (const PendingRegion& entry : entries) {
      Region& region = out.emplace_back(own.of(entry.parameter)[entry.number]);
      region.parameter = entry.parameter;
      region.stage += plan.first_stage[entry.parameter];
      set_buffer(region.from, problem, entry.parameter);
      set_buffer(region.to, problem, entry.parameter);
      if (region.copy.quantises()) {
        set_buffer(region.scales, problem, *problem.scales_of(entry.parameter));
      }
      if (out.size() > 1 && merge(out[out.size() - 2], region)) {
        out.pop_back();
      }
    }
  };
  write_out(sends, program.sends);
  write_out(receives, program.receives);
  write_out(copies, program.copies);
  return program;
}

std::uint64_t PlanSummary::max_egress_bytes() const {
  return egress_bytes.empty() ? 0 : *std::max_element(egress_bytes.begin(), egress_bytes.end());
}

std::uint64_t PlanSummary::max_ingress_bytes() const {
  return ingress_bytes.empty() ? 0 : *std::max_element(ingress_bytes.begin(), ingress_bytes.end());
}

PlanSummary summarize(const Plan& plan, const Problem& problem) {
  PlanSummary summary;
  summary.parameters = plan.pattern_of.size();
  summary.patterns = plan.patterns.size();
  summary.stages = plan.stage_count;
  summary.egress_bytes.assign(static_cast<std::size_t>(problem.world_size()), 0);
  summary.ingress_bytes.assign(static_cast<std::size_t>(problem.world_size()), 0);

  // Parameters of a pattern count alike, so each distinct move is looked at once. Messages are told
  // apart by stage: each pattern's distinct pairs by stage, then the patterns that meet in a stage.
  const auto world = static_cast<std::size_t>(problem.world_size());
  std::vector<std::uint64_t> count(plan.patterns.size(), 0);
  std::set<std::pair<std::uint32_t, std::uint32_t>> starts;  // first stage, pattern
  for (std::size_t i = 0; i < plan.pattern_of.size(); ++i) {
    ++count[plan.pattern_of[i]];
    starts.emplace(plan.first_stage[i], plan.pattern_of[i]);
  }
  std::vector<std::uint32_t> seen(world * world, 0);  // [from, to] -> mark of the last visit
  std::uint32_t mark = 0;
  struct StagePairs {
    std::uint32_t stage;
    std::vector<std::size_t> pairs;
  };
  std::vector<std::vector<StagePairs>> pairs_of(plan.patterns.size());
  std::vector<std::uint64_t> scratch(world, 0);
  for (std::size_t p = 0; p < plan.patterns.size(); ++p) {
    const Pattern& pattern = plan.patterns[p];
    for (const Move& move : pattern.moves) {
      const Rank from = pattern.rank_of(move.from);
      const Rank to = pattern.rank_of(move.to);
      const std::uint64_t bytes =
          checked_mul_bytes(pattern.move_bytes(move), count[p], "plan bytes");
      summary.regions = checked_add_bytes(summary.regions, count[p], "region count");
      if (from == to) {
        summary.local_bytes = checked_add_bytes(summary.local_bytes, bytes, "plan bytes");
        continue;
      }
      summary.bytes = checked_add_bytes(summary.bytes, bytes, "plan bytes");
      summary.egress_bytes[static_cast<std::size_t>(from)] += bytes;
      summary.ingress_bytes[static_cast<std::size_t>(to)] += bytes;
      std::vector<StagePairs>& stages = pairs_of[p];
      if (stages.empty() || stages.back().stage != move.stage) {
        stages.push_back({move.stage, {}});
        ++mark;
      }
      const std::size_t pair =
          static_cast<std::size_t>(from) * world + static_cast<std::size_t>(to);
      if (seen[pair] != mark) {
        seen[pair] = mark;
        stages.back().pairs.push_back(pair);
      }
    }
    for (const ScratchPiece& piece : pattern.scratch) {
      std::uint64_t& most = scratch[static_cast<std::size_t>(piece.rank)];
      most =
          std::max(most, piece.offset_bytes + static_cast<std::uint64_t>(piece.box.volume()) *
                                                  bytes_of(pattern.geometry.destination->dtype()));
    }
  }
  std::map<std::uint32_t, std::vector<const StagePairs*>> by_stage;  // stages yet to be counted
  const auto count_until = [&](std::uint64_t end) {
    while (!by_stage.empty() && by_stage.begin()->first < end) {
      ++mark;
      for (const StagePairs* stage : by_stage.begin()->second) {
        for (const std::size_t pair : stage->pairs) {
          summary.messages += seen[pair] != mark ? 1 : 0;
          seen[pair] = mark;
        }
      }
      by_stage.erase(by_stage.begin());
    }
  };
  for (const auto& [first, p] : starts) {
    count_until(first);
    for (const StagePairs& stage : pairs_of[p]) {
      by_stage[first + stage.stage].push_back(&stage);
    }
  }
  count_until(std::uint64_t{plan.stage_count} + 1);
  if (!scratch.empty()) {
    summary.scratch_bytes = *std::max_element(scratch.begin(), scratch.end());
  }
  return summary;
}

}  // namespace m2n
