// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Plans: who sends which box of which parameter to whom, and one rank's part of it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/plan/problem.hpp"
#include "core/tensor/copy.hpp"

namespace m2n {

/// What two parameters must share to be planned once: shape, dtypes and both layouts.
/// Holdings number the pieces of both sides: first the source's, then the destination's.
struct Geometry {
  std::shared_ptr<const Layout> source;
  std::shared_ptr<const Layout> destination;

  std::uint32_t source_count() const { return static_cast<std::uint32_t>(source->pieces().size()); }
  std::uint32_t destination_count() const {
    return static_cast<std::uint32_t>(destination->pieces().size());
  }
};

/// A piece of scratch memory that a pattern needs on a rank to pass something on. Row-major over
/// its box, in the destination's dtype, at @p offset_bytes of the rank's scratch buffer.
struct ScratchPiece {
  Rank rank = 0;
  Box box;
  std::uint64_t offset_bytes = 0;

  friend auto operator<=>(const ScratchPiece&, const ScratchPiece&) = default;
};

/// One box from one holding to another. Indices of a pattern: @p box into boxes; @p from and @p to
/// are holdings: [0, S) source pieces, [S, S + D) destination pieces, then scratch pieces.
/// A relay's `from` is a destination or scratch holding that an earlier stage has filled.
struct Move {
  std::uint32_t box = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t stage = 0;

  friend auto operator<=>(const Move&, const Move&) = default;
};

/// The moves of one geometry, shared by every parameter that has it and is planned alike.
struct Pattern {
  Geometry geometry;
  std::vector<Box> boxes;
  std::vector<Move> moves;  ///< Sorted by stage; inside a stage in the order that both sides share.
  std::vector<ScratchPiece> scratch;

  Rank rank_of(std::uint32_t holding) const;
  std::vector<bool> holdings_of(Rank rank) const;  ///< [holding] whether it is the rank's.
  Role role_of(std::uint32_t holding) const;
  const Box& box_of(std::uint32_t holding) const;
  /// Bytes on the wire of a move: its box at the destination's dtype.
  std::uint64_t move_bytes(const Move& move) const;
};

/// All moves of a problem. Parameter i follows patterns[pattern_of[i]], its stages counted from
/// first_stage[i]. Stage s is complete on every rank before stage s + 1 starts there, as far as
/// data depends on it.
struct Plan {
  std::string planner;
  std::vector<Pattern> patterns;
  std::vector<std::uint32_t> pattern_of;
  std::vector<std::uint32_t> first_stage;
  std::uint32_t stage_count = 0;
  /// SHA-256 over problem geometry and moves: equal on every rank that will run the same plan.
  std::string digest;
};

/// Where one end of a region lies.
struct Endpoint {
  Rank rank = 0;
  Role role = Role::source;
  std::uint32_t buffer = 0;        ///< Index in Problem::buffers(role).names; 0 for scratch.
  std::uint64_t offset_bytes = 0;  ///< Of the region's first element.
};

/// The part of one parameter that moves from one rank to one rank, simplified (see simplify()).
struct Region {
  std::uint32_t parameter = 0;
  std::uint32_t stage = 0;
  Endpoint from;
  Endpoint to;
  StridedCopy copy;
  std::uint64_t bytes = 0;  ///< At the destination's dtype.
  Endpoint scales;          ///< Of the first element, where the copy quantises: on from.rank.
};

/// One rank's part of a plan. Sends and receives of a pair of ranks stand in the same order on both
/// ranks. Regions that follow one another on both sides are already one.
struct Program {
  Rank rank = 0;
  Rank world_size = 0;
  std::uint32_t stage_count = 0;
  std::vector<Region> sends;     ///< from.rank == rank, to.rank != rank
  std::vector<Region> receives;  ///< to.rank == rank, from.rank != rank
  std::vector<Region> copies;    ///< both ends on rank
  std::uint64_t scratch_bytes = 0;
  std::string plan_digest;
  /// What the program brings, apart from how: for transports that hand whole parameters to a
  /// library. The problem outlives prepare(); null in a program made by hand.
  const Problem* problem = nullptr;
  std::vector<std::uint32_t> parameters;  ///< Of the problem, ascending; the same on every rank.
};

/// @p rank's part of @p plan. Cost: the moves of every distinct pattern once, then own regions.
/// The program refers to @p problem.
Program make_program(const Plan& plan, const Problem& problem, Rank rank);

/// Counts of a plan, from its moves. A message is an ordered pair of different ranks, in one stage.
struct PlanSummary {
  std::uint64_t parameters = 0;
  std::uint64_t patterns = 0;
  std::uint64_t regions = 0;  ///< Moves over all parameters, local copies included.
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;          ///< Between different ranks, counted once, at the receiver.
  std::uint64_t local_bytes = 0;    ///< From a rank to itself.
  std::uint64_t scratch_bytes = 0;  ///< Largest on any rank.
  std::uint32_t stages = 0;
  std::vector<std::uint64_t> egress_bytes;   ///< [rank]
  std::vector<std::uint64_t> ingress_bytes;  ///< [rank]
  std::uint64_t max_egress_bytes() const;
  std::uint64_t max_ingress_bytes() const;
};
PlanSummary summarize(const Plan& plan, const Problem& problem);

/// Proves a plan, whoever made it: every destination element is written exactly once on each rank
/// that needs it, from a holding that has it at that stage; nothing is written outside.
/// Cost: linear in the distinct moves (times a logarithm).
/// @throws Error{bad_plan} naming the parameter, the rank and the box.
void check_plan(const Plan& plan, const Problem& problem);

}  // namespace m2n
