// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/flow_classes.hpp"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

std::uint64_t hash_of(const std::vector<Rank>& set) {
  std::uint64_t hash = set.size();
  for (const Rank rank : set) {
    hash = mix64(hash ^ static_cast<std::uint64_t>(rank));
  }
  return hash;
}

/// Numbers equal rank sets alike.
class RankSets {
 public:
  explicit RankSets(std::vector<std::vector<Rank>>& sets) : sets_(sets) {}

  std::uint32_t number(std::vector<Rank> set) {
    auto& candidates = by_hash_[hash_of(set)];
    for (const std::uint32_t candidate : candidates) {
      if (sets_[candidate] == set) {
        return candidate;
      }
    }
    candidates.push_back(static_cast<std::uint32_t>(sets_.size()));
    sets_.push_back(std::move(set));
    return candidates.back();
  }

 private:
  std::vector<std::vector<Rank>>& sets_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> by_hash_;
};

struct PairHash {
  std::size_t operator()(const std::pair<const std::uint32_t*, const std::uint32_t*>& p) const {
    return mix64(reinterpret_cast<std::uintptr_t>(p.first) ^
                 mix64(reinterpret_cast<std::uintptr_t>(p.second)));
  }
};

std::vector<Rank> ranks_of(std::span<const std::uint32_t> holdings,
                           std::span<const RankPiece> pieces, std::uint32_t first) {
  std::vector<Rank> ranks;
  ranks.reserve(holdings.size());
  for (const std::uint32_t holding : holdings) {
    ranks.push_back(pieces[holding - first].rank);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

/// What atoms with one pair of holding sets have in common.
struct SetPair {
  std::uint32_t number = GeometryFlow::kNone;  // of the class
  std::uint64_t bytes = 0;                     // of the class so far, in one parameter
  std::vector<Rank> local;                     // receivers that hold it themselves
  std::uint64_t local_bytes = 0;
};

}  // namespace

FlowClasses::FlowClasses(const Problem& problem)
    : local_bytes_(static_cast<std::size_t>(problem.world_size()), 0) {
  RankSets sets(sets_);
  std::unordered_map<std::uint64_t, std::uint32_t> class_number;
  for (GeometryGroup& group : group_by_geometry(problem)) {
    const Geometry geometry = group.geometry;
    const auto count = static_cast<std::uint64_t>(group.parameters.size());
    const std::uint64_t item = bytes_of(geometry.destination->dtype());
    Atoms atoms = make_atoms(problem, group);
    GeometryFlow flow{std::move(group), std::move(atoms), {}, {}};
    std::unordered_map<std::pair<const std::uint32_t*, const std::uint32_t*>, SetPair, PairHash>
        pairs;
    std::vector<std::uint64_t> class_bytes;  // by position in order
    std::unordered_map<std::uint32_t, std::size_t> position;
    std::vector<std::uint32_t> order;
    for (std::size_t i = 0; i < flow.atoms.size(); ++i) {
      const Atom atom = flow.atoms[i];
      const auto [at, added] = pairs.try_emplace({atom.holders.data(), atom.receivers.data()});
      SetPair& pair = at->second;
      if (added) {
        std::vector<Rank> holders = ranks_of(atom.holders, geometry.source->pieces(), 0);
        const std::vector<Rank> needing =
            ranks_of(atom.receivers, geometry.destination->pieces(), geometry.source_count());
        std::vector<Rank> receivers;
        std::set_difference(needing.begin(), needing.end(), holders.begin(), holders.end(),
                            std::back_inserter(receivers));
        std::set_intersection(needing.begin(), needing.end(), holders.begin(), holders.end(),
                              std::back_inserter(pair.local));
        if (!receivers.empty()) {
          const std::uint32_t holder_set = sets.number(std::move(holders));
          const std::uint32_t receiver_set = sets.number(std::move(receivers));
          const auto [entry, is_new] =
              class_number.emplace(std::uint64_t{holder_set} << 32 | receiver_set,
                                   static_cast<std::uint32_t>(classes_.size()));
          if (is_new) {
            classes_.push_back({holder_set, receiver_set, 0});
            shares_.emplace_back();
          }
          pair.number = entry->second;
        }
      }
      const std::uint64_t bytes =
          checked_mul_bytes(static_cast<std::uint64_t>(atom.box.volume()), item);
      pair.local_bytes += bytes;
      flow.class_of.push_back(pair.number);
      if (pair.number == GeometryFlow::kNone) {
        flow.offset.push_back(0);
        continue;
      }
      const auto [entry, is_new] = position.emplace(pair.number, order.size());
      if (is_new) {
        order.push_back(pair.number);
        class_bytes.push_back(0);
      }
      flow.offset.push_back(class_bytes[entry->second]);
      class_bytes[entry->second] += bytes;
    }
    const auto number = static_cast<std::uint32_t>(geometries_.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      FlowClass& flow_class = classes_[order[i]];
      flow_class.bytes =
          checked_add_bytes(flow_class.bytes, checked_mul_bytes(class_bytes[i], count));
      shares_[order[i]].push_back({number, class_bytes[i]});
    }
    for (const auto& [key, pair] : pairs) {
      for (const Rank rank : pair.local) {
        std::uint64_t& local = local_bytes_[static_cast<std::size_t>(rank)];
        local = checked_add_bytes(local, checked_mul_bytes(pair.local_bytes, count));
      }
    }
    geometries_.push_back(std::move(flow));
  }
}

}  // namespace m2n
