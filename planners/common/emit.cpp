// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "planners/common/emit.hpp"

#include <algorithm>

namespace m2n {

LaneIndex::LaneIndex(const FlowClasses& classes, const std::vector<Lane>& lanes) {
  std::size_t size = 0;
  for (const FlowClass& flow_class : classes.classes()) {
    first_.push_back(size);
    size += classes.ranks(flow_class.receivers).size();
  }
  places_.resize(size);
  for (std::uint32_t l = 0; l < lanes.size(); ++l) {
    const std::vector<Rank>& all =
        classes.ranks(classes.classes()[lanes[l].class_number].receivers);
    auto at = all.begin();
    for (std::uint32_t copy = 0; copy < lanes[l].receivers.size(); ++copy) {
      at = std::lower_bound(at, all.end(), lanes[l].receivers[copy]);
      places_[first_[lanes[l].class_number] + static_cast<std::size_t>(at - all.begin())] = {l,
                                                                                             copy};
    }
  }
}

PatternMaker::PatternMaker(const GeometryFlow& geometry)
    : sources_(geometry.group.geometry.source->pieces()),
      destinations_(geometry.group.geometry.destination->pieces()),
      first_destination_(geometry.group.geometry.source_count()),
      item_bytes_(bytes_of(geometry.group.geometry.destination->dtype())) {
  pattern_.geometry = geometry.group.geometry;
}

std::uint64_t PatternMaker::begin_atom(const Atom& atom) {
  atom_ = atom;
  bytes_ = static_cast<std::uint64_t>(atom.box.volume()) * item_bytes_;
  whole_box_ = kNoBox;
  if (remote_of_ == atom.receivers.data() && remote_from_ == atom.holders.data()) {
    return bytes_;
  }
  remote_of_ = atom.receivers.data();
  remote_from_ = atom.holders.data();
  remote_.clear();
  local_.clear();
  std::size_t holder = 0;
  Rank last_rank = -1;
  std::uint32_t last_from = 0;  // where a further holding of the rank is copied from
  bool last_is_source = false;
  for (const std::uint32_t holding : atom.receivers) {
    const Rank rank = receiver_rank(holding);
    if (rank == last_rank) {
      local_.push_back({last_from, holding, !last_is_source});
      continue;
    }
    last_rank = rank;
    while (holder < atom.holders.size() && sources_[atom.holders[holder]].rank < rank) {
      ++holder;
    }
    last_is_source = holder < atom.holders.size() && sources_[atom.holders[holder]].rank == rank;
    last_from = last_is_source ? atom.holders[holder] : holding;
    if (last_is_source) {
      local_.push_back({last_from, holding, false});
    } else {
      remote_.push_back(holding);
    }
  }
  return bytes_;
}

std::uint32_t PatternMaker::holding_of(Rank holder) const {
  if (atom_.holders.size() == 1) {
    return atom_.holders.front();
  }
  return *std::lower_bound(
      atom_.holders.begin(), atom_.holders.end(), holder,
      [&](std::uint32_t holding, Rank rank) { return sources_[holding].rank < rank; });
}

void PatternMaker::add_local_moves(std::uint32_t stage, std::uint32_t twin_stage) {
  for (const LocalMove& local : local_) {
    move(box(0, bytes_), local.from, local.to, local.twin ? twin_stage : stage);
  }
}

std::uint32_t PatternMaker::box(std::uint64_t begin, std::uint64_t end) {
  const bool whole = begin == 0 && end == bytes_;
  if (whole && whole_box_ != kNoBox) {
    return whole_box_;
  }
  const std::optional<Box> part = slice(atom_.box, begin, end, bytes_);
  if (!part) {
    return kNoBox;
  }
  pattern_.boxes.push_back(*part);
  const auto number = static_cast<std::uint32_t>(pattern_.boxes.size() - 1);
  if (whole) {
    whole_box_ = number;
  }
  return number;
}

void for_each_stretch(PlanBuilder& builder, const GeometryFlow& geometry,
                      const std::vector<std::size_t>& cuts,
                      const std::function<Pattern(std::span<const std::uint32_t> stretch)>& make,
                      const std::vector<std::uint32_t>* first_stage) {
  const std::vector<std::uint32_t>& parameters = geometry.group.parameters;
  std::size_t begin = 0;
  for (std::size_t c = 0; c <= cuts.size(); ++c) {
    const std::size_t end = c < cuts.size() ? cuts[c] : parameters.size();
    const std::uint32_t pattern =
        builder.add(make(std::span(parameters).subspan(begin, end - begin)));
    for (std::size_t i = begin; i < end; ++i) {
      builder.assign(parameters[i], pattern,
                     first_stage == nullptr ? 0 : (*first_stage)[parameters[i]]);
    }
    begin = end;
  }
}

}  // namespace m2n
