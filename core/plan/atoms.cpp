// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/atoms.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

using HoldingSet = std::vector<std::uint32_t>;

/// A box on which the set of holdings is constant. Cells of one side are disjoint.
struct Cell {
  Box box;
  HoldingSet holdings;
};

/// The dimension along which @p boxes begin at the most places: the best one to sort by.
std::size_t best_dimension(const std::vector<const Box*>& boxes, std::size_t rank) {
  std::size_t best = 0;
  std::size_t most = 0;
  std::vector<Index> begins;
  for (std::size_t d = 0; d < rank; ++d) {
    begins.clear();
    for (const Box* box : boxes) {
      begins.push_back(box->lo[d]);
    }
    std::sort(begins.begin(), begins.end());
    const auto distinct =
        static_cast<std::size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (distinct > most) {
      most = distinct;
      best = d;
    }
  }
  return best;
}

/// Finds the boxes of a fixed list that meet a given box.
class BoxIndex {
 public:
  BoxIndex(std::vector<const Box*> boxes, std::size_t rank)
      : boxes_(std::move(boxes)), rank_(rank), dim_(best_dimension(boxes_, rank)) {
    order_.resize(boxes_.size());
    for (std::size_t i = 0; i < order_.size(); ++i) {
      order_[i] = i;
    }
    if (rank_ == 0) {
      return;
    }
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return boxes_[a]->lo[dim_] < boxes_[b]->lo[dim_];
    });
    Index highest = 0;
    for (const std::size_t i : order_) {
      highest = std::max(highest, boxes_[i]->hi[dim_]);
      highest_end_.push_back(highest);
    }
  }

  /// Calls visit(position, common part) for each box of the list that meets @p box.
  template <class Visit>
  void for_each_meeting(const Box& box, Visit visit) const {
    std::size_t first = 0;
    if (rank_ > 0) {
      first = static_cast<std::size_t>(
          std::upper_bound(highest_end_.begin(), highest_end_.end(), box.lo[dim_]) -
          highest_end_.begin());
    }
    for (std::size_t at = first; at < order_.size(); ++at) {
      const Box& other = *boxes_[order_[at]];
      if (rank_ > 0 && other.lo[dim_] >= box.hi[dim_]) {
        return;
      }
      if (const auto common = intersect(box, other)) {
        visit(order_[at], *common);
      }
    }
  }

 private:
  std::vector<const Box*> boxes_;
  std::size_t rank_;
  std::size_t dim_;
  std::vector<std::size_t> order_;
  std::vector<Index> highest_end_;  // largest end of order_[0..i]: begins are sorted, ends are not
};

std::vector<const Box*> pointers(const std::vector<Cell>& cells) {
  std::vector<const Box*> boxes;
  boxes.reserve(cells.size());
  for (const Cell& cell : cells) {
    boxes.push_back(&cell.box);
  }
  return boxes;
}

bool disjoint(const std::vector<Cell>& cells, std::size_t rank) {
  const BoxIndex index(pointers(cells), rank);
  for (const Cell& cell : cells) {
    std::size_t meetings = 0;
    index.for_each_meeting(cell.box, [&](std::size_t, const Box&) { ++meetings; });
    if (meetings != 1) {
      return false;
    }
  }
  return true;
}

/// Cells of the pieces of one side, numbered from @p first_holding.
std::vector<Cell> cells_of(const Layout& layout, std::uint32_t first_holding) {
  std::map<Box, HoldingSet> by_box;
  std::uint32_t holding = first_holding;
  for (const RankPiece& entry : layout.pieces()) {
    by_box[entry.piece.box].push_back(holding++);
  }
  std::vector<Cell> cells;
  cells.reserve(by_box.size());
  for (auto& [box, holdings] : by_box) {
    cells.push_back({box, std::move(holdings)});
  }
  if (disjoint(cells, layout.shape().size())) {
    return cells;
  }
  // Boxes overlap without being equal: refine. Rare, and small (explicit pieces).
  std::vector<Cell> refined;
  std::vector<Box> rest;
  std::vector<Box> parts;
  for (const Cell& next : cells) {
    rest.assign(1, next.box);
    const std::size_t before = refined.size();
    for (std::size_t i = 0; i < before; ++i) {
      const auto common = intersect(refined[i].box, next.box);
      if (!common) {
        continue;
      }
      parts.clear();
      subtract(refined[i].box, *common, parts);
      for (const Box& part : parts) {
        refined.push_back({part, refined[i].holdings});
      }
      refined[i].box = *common;
      refined[i].holdings.insert(refined[i].holdings.end(), next.holdings.begin(),
                                 next.holdings.end());
      std::vector<Box> left;
      for (const Box& box : rest) {
        subtract(box, *common, left);
      }
      rest = std::move(left);
    }
    for (const Box& box : rest) {
      refined.push_back({box, next.holdings});
    }
  }
  for (Cell& cell : refined) {
    std::sort(cell.holdings.begin(), cell.holdings.end());
  }
  std::sort(refined.begin(), refined.end(),
            [](const Cell& a, const Cell& b) { return a.box < b.box; });
  return refined;
}

/// Numbers equal sets alike.
class SetTable {
 public:
  explicit SetTable(std::vector<HoldingSet>& sets) : sets_(sets) {}

  std::uint32_t number(const HoldingSet& set) {
    const auto [at, added] = numbers_.emplace(set, static_cast<std::uint32_t>(sets_.size()));
    if (added) {
      sets_.push_back(set);
    }
    return at->second;
  }

 private:
  std::vector<HoldingSet>& sets_;
  std::map<HoldingSet, std::uint32_t> numbers_;
};

}  // namespace

Atoms::Atoms(const Geometry& geometry) {
  const std::size_t rank = geometry.source->shape().size();
  const std::vector<Cell> sources = cells_of(*geometry.source, 0);
  const std::vector<Cell> destinations = cells_of(*geometry.destination, geometry.source_count());
  SetTable holders(holder_sets_);
  SetTable receivers(receiver_sets_);
  std::vector<std::uint32_t> holder_number;
  for (const Cell& cell : sources) {
    holder_number.push_back(holders.number(cell.holdings));
  }
  const BoxIndex index(pointers(sources), rank);
  for (const Cell& cell : destinations) {
    const std::uint32_t receiver_number = receivers.number(cell.holdings);
    const std::size_t first = boxes_.size();
    Index covered = 0;
    index.for_each_meeting(cell.box, [&](std::size_t source, const Box& common) {
      boxes_.push_back(common);
      holder_set_.push_back(holder_number[source]);
      receiver_set_.push_back(receiver_number);
      covered += common.volume();
    });
    if (covered != cell.box.volume()) {
      std::vector<Box> missing{cell.box};
      for (std::size_t i = first; i < boxes_.size(); ++i) {
        std::vector<Box> left;
        for (const Box& box : missing) {
          subtract(box, boxes_[i], left);
        }
        missing = std::move(left);
      }
      throw Error(Errc::bad_plan,
                  "box " + to_string(missing.front()) + " is needed at the destination (rank " +
                      std::to_string(geometry.destination
                                         ->pieces()[cell.holdings.front() - geometry.source_count()]
                                         .rank) +
                      ") but no source rank holds it");
    }
  }
}

Atom Atoms::operator[](std::size_t i) const {
  return {boxes_[i], holder_sets_[holder_set_[i]], receiver_sets_[receiver_set_[i]]};
}

}  // namespace m2n
