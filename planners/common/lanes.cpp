// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "planners/common/lanes.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "core/plan/flow.hpp"
#include "planners/common/emit.hpp"

namespace m2n {

std::vector<Lane> whole_lanes(const FlowClasses& classes) {
  std::vector<Lane> lanes;
  for (std::uint32_t c = 0; c < classes.classes().size(); ++c) {
    const FlowClass& flow_class = classes.classes()[c];
    lanes.push_back(
        {c, classes.ranks(flow_class.holders), classes.ranks(flow_class.receivers), {}});
  }
  return lanes;
}

std::vector<Lane> island_lanes(const FlowClasses& classes, const Ports& ports,
                               bool far_islands_apart) {
  std::vector<Lane> lanes;
  for (std::uint32_t c = 0; c < classes.classes().size(); ++c) {
    const FlowClass& flow_class = classes.classes()[c];
    const std::vector<Rank>& holders = classes.ranks(flow_class.holders);
    std::map<std::uint32_t, Lane> near;
    for (const Rank holder : holders) {
      Lane& lane = near[ports.island_of(holder)];
      lane.class_number = c;
      lane.holders.push_back(holder);
      lane.ports.push_back(Ports::link_out(holder));
    }
    std::map<std::uint32_t, Lane> far;
    for (const Rank receiver : classes.ranks(flow_class.receivers)) {
      const std::uint32_t island = ports.island_of(receiver);
      const auto at = near.find(island);
      if (at != near.end()) {
        at->second.receivers.push_back(receiver);
        continue;
      }
      Lane& lane = far[far_islands_apart ? island : 0];
      if (lane.holders.empty()) {
        lane.class_number = c;
        lane.holders = holders;
        for (const Rank holder : holders) {
          lane.ports.push_back(ports.nic_out(holder));
        }
      }
      lane.receivers.push_back(receiver);
    }
    for (auto* group : {&near, &far}) {
      for (auto& [island, lane] : *group) {
        if (!lane.receivers.empty()) {
          lanes.push_back(std::move(lane));
        }
      }
    }
  }
  return lanes;
}

std::vector<std::size_t> Splitter::cuts(std::uint32_t) const { return {}; }

QuotaSplitter::QuotaSplitter(const FlowClasses& classes, const std::vector<Lane>& lanes,
                             const Ports& ports, bool one_copy)
    : classes_(classes), filled_(lanes.size()), cuts_(classes.geometries().size()) {
  std::vector<double> rates;
  for (std::uint32_t port = 0; port < ports.size(); ++port) {
    rates.push_back(ports.rate(port));
  }
  std::vector<FlowDemand> demands;
  demands.reserve(lanes.size());
  for (const Lane& lane : lanes) {
    const std::uint64_t copies = one_copy ? 1 : lane.receivers.size();
    demands.push_back(
        {checked_mul_bytes(classes.classes()[lane.class_number].bytes, copies), lane.ports});
  }
  const MinMaxFlow flow = min_max_flow(demands, rates);

  /// Where the bytes of a class lie: parameters in order, and the end of each.
  struct Run {
    std::uint32_t parameter;
    std::uint32_t geometry;
    std::uint64_t bytes;
  };
  std::map<std::uint32_t, std::vector<Run>> runs_of_class;
  const auto runs_of = [&](std::uint32_t number) -> const std::vector<Run>& {
    const auto [at, added] = runs_of_class.try_emplace(number);
    if (added) {
      for (const FlowClasses::Share& share : classes.shares(number)) {
        for (const std::uint32_t parameter :
             classes.geometries()[share.geometry].group.parameters) {
          at->second.push_back({parameter, share.geometry, share.bytes});
        }
      }
      std::sort(at->second.begin(), at->second.end(),
                [](const Run& a, const Run& b) { return a.parameter < b.parameter; });
    }
    return at->second;
  };
  for (std::size_t l = 0; l < lanes.size(); ++l) {
    const Lane& lane = lanes[l];
    const std::uint64_t length = classes.classes()[lane.class_number].bytes;
    const std::uint64_t copies = one_copy ? 1 : lane.receivers.size();
    Filled& filled = filled_[l];
    filled.first_holder.assign(copies, 0);
    filled.bytes = demands[l].bytes;
    if (lane.holders.size() == 1 || length == 0) {
      continue;
    }
    double sum = 0;
    std::uint64_t done = 0;  // bytes of the lane that have a holder
    std::uint32_t next_copy = 0;
    for (std::uint32_t h = 0; h < lane.holders.size(); ++h) {
      sum += flow.bytes[l][h];
      const std::uint64_t end =
          h + 1 == lane.holders.size()
              ? demands[l].bytes
              : std::min(demands[l].bytes, static_cast<std::uint64_t>(std::llround(sum)));
      if (end <= done) {
        continue;
      }
      // [done, end) is holder h's: it takes over inside a copy, and begins the copies that start
      // before the end.
      if (done % length != 0) {
        std::uint64_t offset = done % length;
        for (const Run& run : runs_of(lane.class_number)) {
          if (offset < run.bytes) {
            filled.boundaries.push_back(
                {static_cast<std::uint32_t>(done / length), run.parameter, offset, h, done});
            cuts_[run.geometry].emplace_back(run.parameter, offset > 0);
            for (const FlowClasses::Share& share : classes.shares(lane.class_number)) {
              if (share.geometry != run.geometry) {
                cuts_[share.geometry].emplace_back(run.parameter, false);
              }
            }
            break;
          }
          offset -= run.bytes;
        }
      }
      while (next_copy < copies && next_copy * length < end) {
        filled.first_holder[next_copy++] = h;
      }
      done = end;
    }
  }
}

std::vector<std::size_t> QuotaSplitter::cuts(std::uint32_t geometry) const {
  const std::vector<std::uint32_t>& parameters = classes_.geometries()[geometry].group.parameters;
  std::vector<std::size_t> positions;
  for (const auto& [parameter, inside] : cuts_[geometry]) {
    const auto at = std::lower_bound(parameters.begin(), parameters.end(), parameter);
    positions.push_back(static_cast<std::size_t>(at - parameters.begin()));
    if (inside) {
      positions.push_back(positions.back() + 1);
    }
  }
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  std::erase_if(positions, [&](std::size_t position) {
    return position == 0 || position >= parameters.size();
  });
  return positions;
}

void QuotaSplitter::split(std::uint32_t lane, std::uint32_t copy, std::uint32_t parameter,
                          std::uint64_t offset, std::uint64_t bytes,
                          std::vector<LanePart>& out) const {
  const Filled& filled = filled_[lane];
  std::uint32_t holder = filled.first_holder[copy];
  std::uint64_t begin = 0;
  auto boundary =
      std::lower_bound(filled.boundaries.begin(), filled.boundaries.end(), copy,
                       [](const Boundary& b, std::uint32_t wanted) { return b.copy < wanted; });
  for (; boundary != filled.boundaries.end() && boundary->copy == copy; ++boundary) {
    const bool before = boundary->parameter < parameter ||
                        (boundary->parameter == parameter && boundary->offset <= offset + begin);
    if (before) {
      holder = boundary->holder;
      continue;
    }
    if (boundary->parameter > parameter || boundary->offset >= offset + bytes) {
      break;
    }
    out.push_back({holder, begin, boundary->offset - offset});
    begin = boundary->offset - offset;
    holder = boundary->holder;
  }
  out.push_back({holder, begin, bytes});
}

QuotaSplitter::Stretch QuotaSplitter::stretch(std::uint32_t lane, std::uint64_t at) const {
  const Filled& filled = filled_[lane];
  const auto after =
      std::upper_bound(filled.boundaries.begin(), filled.boundaries.end(), at,
                       [](std::uint64_t wanted, const Boundary& b) { return wanted < b.at; });
  return {after == filled.boundaries.begin() ? 0 : std::prev(after)->at,
          after == filled.boundaries.end() ? filled.bytes : after->at};
}

std::optional<Box> slice(const Box& box, std::uint64_t begin, std::uint64_t end,
                         std::uint64_t bytes) {
  if (begin == 0 && end == bytes) {
    return box;
  }
  if (box.rank() == 0) {
    return begin == 0 && end > begin ? std::optional(box) : std::nullopt;
  }
  std::size_t longest = 0;
  for (std::size_t d = 1; d < box.rank(); ++d) {
    longest = box[d].size() > box[longest].size() ? d : longest;
  }
  const auto extent = static_cast<double>(box[longest].size());
  const auto index = [&](std::uint64_t at) {
    return box.lo[longest] +
           std::llround(static_cast<double>(at) / static_cast<double>(bytes) * extent);
  };
  Box part = box;
  part.lo[longest] = index(begin);
  part.hi[longest] = index(end);
  if (part.empty()) {
    return std::nullopt;
  }
  return part;
}

void add_direct(PlanBuilder& builder, const FlowClasses& classes, const std::vector<Lane>& lanes,
                const Splitter& splitter) {
  const LaneIndex index(classes, lanes);
  std::vector<LanePart> parts;
  for (std::uint32_t g = 0; g < classes.geometries().size(); ++g) {
    const GeometryFlow& geometry = classes.geometries()[g];
    for_each_stretch(
        builder, geometry, splitter.cuts(g), [&](std::span<const std::uint32_t> stretch) {
          PatternMaker maker(geometry);
          for (std::size_t a = 0; a < geometry.atoms.size(); ++a) {
            const Atom atom = geometry.atoms[a];
            const std::uint32_t number = geometry.class_of[a];
            const std::uint64_t bytes = maker.begin_atom(atom);
            maker.add_local_moves(0, 1);
            std::size_t receiver = 0;
            for (const std::uint32_t holding : maker.remote_receivers()) {
              const auto [lane, copy] = index.of(number, receiver++);
              parts.clear();
              splitter.split(lane, copy, stretch.front(), geometry.offset[a], bytes, parts);
              for (const LanePart& part : parts) {
                const std::uint32_t box = maker.box(part.begin, part.end);
                if (box != PatternMaker::kNoBox) {
                  maker.move(box, maker.holding_of(lanes[lane].holders[part.holder]), holding, 0);
                }
              }
            }
          }
          return std::move(maker).take();
        });
  }
}

std::uint64_t positive_option(std::string_view who, const Options& options, std::string_view key,
                              std::uint64_t otherwise) {
  const auto at = options.find(key);
  if (at == options.end()) {
    return otherwise;
  }
  std::uint64_t value = 0;
  const char* end = at->second.data() + at->second.size();
  const auto [stop, error] = std::from_chars(at->second.data(), end, value);
  if (error != std::errc() || stop != end || value == 0) {
    throw Error(Errc::usage, std::string(who) + ": option '" + std::string(key) + "' is '" +
                                 at->second + "'; it must be a whole number above 0");
  }
  return value;
}

std::string choice_option(std::string_view who, const Options& options, std::string_view key,
                          std::initializer_list<std::string_view> choices) {
  const auto at = options.find(key);
  if (at == options.end()) {
    return std::string(*choices.begin());
  }
  std::string names;
  for (const std::string_view choice : choices) {
    if (at->second == choice) {
      return at->second;
    }
    names += (names.empty() ? "" : ", ") + std::string(choice);
  }
  throw Error(Errc::usage, std::string(who) + ": option '" + std::string(key) + "' is '" +
                               at->second + "'; the choices are " + names);
}

}  // namespace m2n
