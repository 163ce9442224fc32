// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planner "broadcast": what most systems do. Each parameter is gathered on the first source
/// rank, travels whole through every worker along one chain, and each worker keeps its part.
///
/// A parameter goes chunk by chunk, chunk c of it in stage 2 * first + c: gathered in that stage,
/// at the k-th worker k stages later, and copied from scratch one stage after it came. Scratch is
/// two chunks a rank, used in turn: the chunk after next arrives at a rank one stage after the last
/// read of its place there, because a rank forwards and copies a chunk in the stage after it came.

#include <algorithm>
#include <map>
#include <numeric>

#include "core/api/plugins.hpp"
#include "planners/common/lanes.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kBroadcastChunkBytes = 64U << 20;

/// A whole tensor in boxes of at most about @p chunk_bytes, cut across its longest dimension.
std::vector<Box> chunks_of(const Shape& shape, std::uint64_t bytes, std::uint64_t chunk_bytes) {
  const Box whole = Box::whole(shape);
  std::vector<Box> boxes;
  for (std::uint64_t begin = 0; begin < bytes; begin += chunk_bytes) {
    if (const auto box = slice(whole, begin, std::min(bytes, begin + chunk_bytes), bytes)) {
      boxes.push_back(*box);
    }
  }
  return boxes;
}

class BroadcastPlanner final : public Planner {
 public:
  explicit BroadcastPlanner(std::uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}
  std::string_view name() const noexcept override { return "broadcast"; }

 private:
  void do_plan(const Topology& topology, PlanBuilder& builder) const override {
    const Problem& problem = builder.problem();
    topology.require(problem.world_size());
    const Ports ports(topology);
    const Rank root = problem.source_ranks().front();
    std::vector<Rank> chain;  // island by island, so that the chain enters each island once
    std::copy_if(problem.destination_ranks().begin(), problem.destination_ranks().end(),
                 std::back_inserter(chain), [&](Rank rank) { return rank != root; });
    std::stable_sort(chain.begin(), chain.end(),
                     [&](Rank a, Rank b) { return ports.island_of(a) < ports.island_of(b); });
    chain.insert(chain.begin(), root);

    const std::vector<GeometryGroup> groups = group_by_geometry(problem);
    std::vector<std::vector<Box>> chunks;  // [group]
    std::uint64_t place_bytes = 0;         // of the largest chunk of any parameter
    for (const GeometryGroup& group : groups) {
      const Layout& layout = *group.geometry.destination;
      const std::uint64_t item = bytes_of(layout.dtype());
      chunks.push_back(chunks_of(
          layout.shape(), problem.parameters()[group.parameters.front()].bytes(), chunk_bytes_));
      for (const Box& box : chunks.back()) {
        place_bytes = std::max(place_bytes, static_cast<std::uint64_t>(box.volume()) * item);
      }
    }
    std::vector<std::uint32_t> number(problem.parameters().size());
    std::vector<std::uint32_t> stages(problem.parameters().size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::uint32_t pattern =
          builder.add(make_pattern(problem, groups[g], chunks[g], chain, place_bytes));
      const auto even = static_cast<std::uint32_t>(chunks[g].size() + chunks[g].size() % 2);
      for (const std::uint32_t parameter : groups[g].parameters) {
        number[parameter] = pattern;
        stages[parameter] = even;
      }
    }
    std::uint32_t first = 0;
    for (std::uint32_t parameter = 0; parameter < number.size(); ++parameter) {
      builder.assign(parameter, number[parameter], first);
      first += stages[parameter];
    }
  }

  static Pattern make_pattern(const Problem& problem, const GeometryGroup& group,
                              const std::vector<Box>& chunks, const std::vector<Rank>& chain,
                              std::uint64_t place_bytes) {
    const Atoms atoms = make_atoms(problem, group);
    Pattern pattern;
    pattern.geometry = group.geometry;
    const std::uint32_t sources = group.geometry.source_count();
    const std::uint32_t first_scratch = sources + group.geometry.destination_count();
    const std::span<const RankPiece> targets = group.geometry.destination->pieces();
    std::map<Rank, std::vector<std::uint32_t>> targets_of;
    for (std::uint32_t t = 0; t < targets.size(); ++t) {
      targets_of[targets[t].rank].push_back(t);
    }
    const auto add_box = [&](const Box& box) {
      pattern.boxes.push_back(box);
      return static_cast<std::uint32_t>(pattern.boxes.size() - 1);
    };
    for (std::uint32_t c = 0; c < chunks.size(); ++c) {
      const Box& chunk = chunks[c];
      const auto scratch = [&](std::size_t position) {
        return first_scratch + static_cast<std::uint32_t>(c * chain.size() + position);
      };
      for (const Rank rank : chain) {
        pattern.scratch.push_back({rank, chunk, (c % 2) * place_bytes});
      }
      std::vector<std::uint32_t> gathered;
      Index volume = 0;
      for (std::size_t a = 0; a < atoms.size(); ++a) {
        const Atom atom = atoms[a];
        const auto common = intersect(atom.box, chunk);
        if (!common) {
          continue;
        }
        std::uint32_t from = atom.holders.front();
        for (const std::uint32_t holder : atom.holders) {
          if (pattern.rank_of(holder) == chain.front()) {
            from = holder;
            break;
          }
        }
        gathered.push_back(add_box(*common));
        volume += common->volume();
        pattern.moves.push_back({gathered.back(), from, scratch(0), c});
      }
      // Elements that nobody needs are not gathered, and then the chunk does not go as one.
      if (volume == chunk.volume()) {
        gathered.assign(1, add_box(chunk));
      }
      for (std::uint32_t position = 0; position < chain.size(); ++position) {
        const std::uint32_t next = c + 1 + position;
        if (position + 1 < chain.size()) {
          for (const std::uint32_t box : gathered) {
            pattern.moves.push_back({box, scratch(position), scratch(position + 1), next});
          }
        }
        for (const std::uint32_t t : targets_of[chain[position]]) {
          if (const auto common = intersect(targets[t].piece.box, chunk)) {
            pattern.moves.push_back({add_box(*common), scratch(position), sources + t, next});
          }
        }
      }
    }
    return pattern;
  }

  std::uint64_t chunk_bytes_;
};

}  // namespace

void add_planner_broadcast(Registries& registries) {
  registries.planners.add(
      "broadcast", "gathers on one rank, then sends everything to every worker; chunk_bytes=N",
      [](const PlannerContext& context) {
        constexpr std::string_view kWho = "planner 'broadcast'";
        require_known_options(kWho, context.options, {"chunk_bytes"});
        return std::make_unique<BroadcastPlanner>(
            positive_option(kWho, context.options, "chunk_bytes", kBroadcastChunkBytes));
      });
}

}  // namespace m2n
