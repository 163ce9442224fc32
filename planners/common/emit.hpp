// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Emission: what every planner that works on classes does to write its patterns down.

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "planners/common/lanes.hpp"

namespace m2n {

/// For each class and each of its receivers (a position in the class's rank set): the lane, and the
/// copy in it.
class LaneIndex {
 public:
  LaneIndex(const FlowClasses& classes, const std::vector<Lane>& lanes);
  std::pair<std::uint32_t, std::uint32_t> of(std::uint32_t number, std::size_t receiver) const {
    return places_[first_[number] + receiver];
  }

 private:
  std::vector<std::size_t> first_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> places_;
};

/// Writes one pattern atom by atom.
class PatternMaker {
 public:
  static constexpr std::uint32_t kNoBox = 0xffffffffU;

  explicit PatternMaker(const GeometryFlow& geometry);

  /// @return the atom's bytes on the wire.
  std::uint64_t begin_atom(const Atom& atom);
  /// The first holding of each receiver that holds nothing of the atom itself, by rank.
  const std::vector<std::uint32_t>& remote_receivers() const { return remote_; }
  /// A rank's first source holding of the atom. @pre it has one.
  std::uint32_t holding_of(Rank holder) const;
  /// Copies of receivers that hold the atom, at @p stage; further holdings of a rank are copied
  /// from its first one at @p twin_stage.
  void add_local_moves(std::uint32_t stage, std::uint32_t twin_stage);

  /// Number of the box at bytes [begin, end) of the atom, or kNoBox when it is empty.
  std::uint32_t box(std::uint64_t begin, std::uint64_t end);
  void move(std::uint32_t box, std::uint32_t from, std::uint32_t to, std::uint32_t stage) {
    pattern_.moves.push_back({box, from, to, stage});
  }
  Pattern take() && { return std::move(pattern_); }

 private:
  Rank receiver_rank(std::uint32_t holding) const {
    return destinations_[holding - first_destination_].rank;
  }

  Pattern pattern_;
  std::span<const RankPiece> sources_;
  std::span<const RankPiece> destinations_;
  std::uint32_t first_destination_;
  std::uint64_t item_bytes_;
  Atom atom_;
  std::uint64_t bytes_ = 0;
  std::uint32_t whole_box_ = kNoBox;
  const std::uint32_t* remote_of_ = nullptr;  // the sets that remote_ was made from
  const std::uint32_t* remote_from_ = nullptr;
  std::vector<std::uint32_t> remote_;
  struct LocalMove {
    std::uint32_t from;
    std::uint32_t to;
    bool twin;
  };
  std::vector<LocalMove> local_;
};

/// Makes a pattern for each stretch of a geometry's parameters between cuts, and assigns it to all
/// of them, from stage @p first_stage[parameter] on, which @p make may still fill in.
void for_each_stretch(PlanBuilder& builder, const GeometryFlow& geometry,
                      const std::vector<std::size_t>& cuts,
                      const std::function<Pattern(std::span<const std::uint32_t> stretch)>& make,
                      const std::vector<std::uint32_t>* first_stage = nullptr);

}  // namespace m2n
