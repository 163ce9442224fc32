// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/plan/plan.hpp"

namespace m2n {
namespace {

/// A box that a move writes into a holding, and when.
struct Arrival {
  const Box* box;
  std::uint32_t stage;
};

/// The first two arrivals that share an element, if any.
const Box* first_overlap(std::vector<Arrival>& arrivals, std::size_t rank) {
  if (arrivals.size() < 2) {
    return nullptr;
  }
  if (rank == 0) {
    return arrivals[1].box;
  }
  // Sweep along the dimension in which the boxes begin at the most places.
  std::size_t dim = 0;
  std::size_t most = 0;
  std::vector<Index> begins;
  for (std::size_t d = 0; d < rank; ++d) {
    begins.clear();
    for (const Arrival& arrival : arrivals) {
      begins.push_back(arrival.box->lo[d]);
    }
    std::sort(begins.begin(), begins.end());
    const auto distinct =
        static_cast<std::size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (distinct > most) {
      most = distinct;
      dim = d;
    }
  }
  std::sort(arrivals.begin(), arrivals.end(),
            [&](const Arrival& a, const Arrival& b) { return a.box->lo[dim] < b.box->lo[dim]; });
  std::vector<const Box*> active;
  for (const Arrival& arrival : arrivals) {
    std::erase_if(active, [&](const Box* box) { return box->hi[dim] <= arrival.box->lo[dim]; });
    for (const Box* box : active) {
      if (intersect(*box, *arrival.box)) {
        return arrival.box;
      }
    }
    active.push_back(arrival.box);
  }
  return nullptr;
}

class PatternCheck {
 public:
  PatternCheck(const Pattern& pattern, const std::string& parameter)
      : pattern_(pattern),
        parameter_(parameter),
        sources_(pattern.geometry.source_count()),
        arrivals_(sources_ + pattern.geometry.destination_count() + pattern.scratch.size()) {}

  void run() {
    for (const Move& move : pattern_.moves) {
      check_bounds(move);
      arrivals_[move.to].push_back({&pattern_.boxes[move.box], move.stage});
    }
    const std::size_t rank = pattern_.geometry.destination->shape().size();
    for (std::uint32_t holding = sources_; holding < arrivals_.size(); ++holding) {
      if (const Box* twice = first_overlap(arrivals_[holding], rank)) {
        fail(holding, *twice, "is written more than once");
      }
    }
    for (std::uint32_t i = 0; i < pattern_.geometry.destination_count(); ++i) {
      check_complete(sources_ + i);
    }
    for (const Move& move : pattern_.moves) {
      if (move.from >= sources_) {
        check_relay(move);
      }
    }
  }

 private:
  [[noreturn]] void fail(std::uint32_t holding, const Box& box, const std::string& what) const {
    throw Error(Errc::bad_plan, "plan of parameter '" + parameter_ + "': box " + to_string(box) +
                                    " on rank " + std::to_string(pattern_.rank_of(holding)) + " " +
                                    what);
  }

  void check_bounds(const Move& move) const {
    if (move.box >= pattern_.boxes.size() || move.from >= arrivals_.size() ||
        move.to >= arrivals_.size() || move.to < sources_ || move.from == move.to) {
      throw Error(Errc::bad_plan, "plan of parameter '" + parameter_ +
                                      "': a move names a box or a holding that does not exist");
    }
    const Box& box = pattern_.boxes[move.box];
    if (box.empty()) {
      fail(move.to, box, "is empty, and moves anyway");
    }
    if (!pattern_.box_of(move.from).contains(box)) {
      fail(move.from, box, "is sent from a rank that does not hold it");
    }
    if (!pattern_.box_of(move.to).contains(box)) {
      fail(move.to, box, "is written outside of what the rank holds");
    }
  }

  void check_complete(std::uint32_t holding) const {
    Index written = 0;
    for (const Arrival& arrival : arrivals_[holding]) {
      written += arrival.box->volume();
    }
    const Box& whole = pattern_.box_of(holding);
    if (written == whole.volume()) {
      return;
    }
    std::vector<Box> missing{whole};
    for (const Arrival& arrival : arrivals_[holding]) {
      std::vector<Box> left;
      for (const Box& box : missing) {
        subtract(box, *arrival.box, left);
      }
      missing = std::move(left);
    }
    fail(holding, missing.front(), "is never written");
  }

  /// What a relay passes on must have arrived in an earlier stage.
  void check_relay(const Move& move) const {
    const Box& box = pattern_.boxes[move.box];
    Index arrived = 0;
    for (const Arrival& arrival : arrivals_[move.from]) {
      if (arrival.stage < move.stage) {
        if (const auto common = intersect(box, *arrival.box)) {
          arrived += common->volume();
        }
      }
    }
    if (arrived != box.volume()) {
      fail(move.from, box, "is passed on before it has arrived");
    }
  }

  const Pattern& pattern_;
  const std::string& parameter_;
  std::uint32_t sources_;
  std::vector<std::vector<Arrival>> arrivals_;  // by holding
};

/// A use of scratch memory by one parameter.
struct ScratchUse {
  Rank rank;
  std::uint32_t first_stage;
  std::uint32_t last_stage;
  std::uint64_t begin;
  std::uint64_t end;
  std::uint32_t parameter;
};

void append_scratch_uses(const Pattern& pattern, std::uint32_t first_stage, std::uint32_t parameter,
                         std::vector<ScratchUse>& uses) {
  const std::uint32_t first =
      pattern.geometry.source_count() + pattern.geometry.destination_count();
  const std::uint64_t item_bytes = bytes_of(pattern.geometry.destination->dtype());
  std::vector<ScratchUse> own;
  for (const ScratchPiece& piece : pattern.scratch) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(piece.box.volume()) * item_bytes;
    own.push_back({piece.rank, ~0U, 0, piece.offset_bytes, piece.offset_bytes + bytes, parameter});
  }
  const auto touch = [&](std::uint32_t holding, std::uint32_t stage) {
    if (holding >= first) {
      ScratchUse& use = own[holding - first];
      use.first_stage = std::min(use.first_stage, first_stage + stage);
      use.last_stage = std::max(use.last_stage, first_stage + stage);
    }
  };
  for (const Move& move : pattern.moves) {
    touch(move.from, move.stage);
    touch(move.to, move.stage);
  }
  for (const ScratchUse& use : own) {
    if (use.first_stage <= use.last_stage && use.begin < use.end) {
      uses.push_back(use);
    }
  }
}

/// No two uses share a byte in a stage.
void check_scratch(std::vector<ScratchUse> uses, const Problem& problem) {
  std::sort(uses.begin(), uses.end(), [](const ScratchUse& a, const ScratchUse& b) {
    return std::tie(a.rank, a.first_stage, a.begin) < std::tie(b.rank, b.first_stage, b.begin);
  });
  std::vector<const ScratchUse*> active;
  for (const ScratchUse& use : uses) {
    std::erase_if(active, [&](const ScratchUse* other) {
      return other->rank != use.rank || other->last_stage < use.first_stage;
    });
    for (const ScratchUse* other : active) {
      if (other->begin < use.end && use.begin < other->end) {
        throw Error(Errc::bad_plan,
                    "plan of parameter '" + problem.parameters()[use.parameter].name +
                        "': its scratch memory on rank " + std::to_string(use.rank) +
                        " is still in use by parameter '" +
                        problem.parameters()[other->parameter].name + "'");
      }
    }
    active.push_back(&use);
  }
}

}  // namespace

void check_plan(const Plan& plan, const Problem& problem) {
  if (plan.pattern_of.size() != problem.parameters().size() ||
      plan.first_stage.size() != plan.pattern_of.size()) {
    throw Error(Errc::bad_plan, "the plan has " + std::to_string(plan.pattern_of.size()) +
                                    " parameters, the problem " +
                                    std::to_string(problem.parameters().size()));
  }
  std::vector<bool> checked(plan.patterns.size(), false);
  std::vector<ScratchUse> scratch;
  for (std::size_t i = 0; i < plan.pattern_of.size(); ++i) {
    const std::uint32_t number = plan.pattern_of[i];
    const Parameter& parameter = problem.parameters()[i];
    if (number >= plan.patterns.size()) {
      throw Error(Errc::bad_plan, "parameter '" + parameter.name + "' follows pattern " +
                                      std::to_string(number) + ", which does not exist");
    }
    const Pattern& pattern = plan.patterns[number];
    const auto same = [](const auto& a, const auto& b) { return a == b || *a == *b; };
    if (!same(pattern.geometry.source, parameter.source.layout) ||
        !same(pattern.geometry.destination, parameter.destination.layout)) {
      throw Error(Errc::bad_plan,
                  "parameter '" + parameter.name + "' follows a pattern of another geometry");
    }
    if (!checked[number]) {
      PatternCheck(pattern, parameter.name).run();
      checked[number] = true;
    }
    append_scratch_uses(pattern, plan.first_stage[i], static_cast<std::uint32_t>(i), scratch);
  }
  check_scratch(std::move(scratch), problem);
}

}  // namespace m2n
