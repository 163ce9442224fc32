// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planner "relay": every byte leaves the sources once, and receivers pass it on along chains.
///
/// A box is cut into pieces. A piece enters at one receiver (by a holder of the receiver's island
/// over links, otherwise by any holder over NICs), from there goes from island to island, one
/// member each, and inside every island along the other members. The place of entry and the order
/// of the chain rotate from piece to piece, so that every member is last equally often. Which
/// holder sends how much is the exact min-max of "balanced", for one copy.
///
/// Stages: a piece's first hop is in the wave of its place in what its holder serves, each further
/// hop one stage later. There are as many waves as the busiest receiver gets chunks, and a wave has
/// a piece for each receiver to enter at: in a stage every port, and every link of the chain,
/// carries about one chunk in all.

#include <algorithm>
#include <map>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/plan/certificate.hpp"
#include "planners/common/emit.hpp"

namespace m2n {
namespace {

constexpr std::uint64_t kRelayChunkBytes = 4U << 20;
/// A chunk is cut into a piece for each receiver to enter at, but not finer than this.
constexpr std::uint64_t kLeastPieceBytes = 64U << 10;
/// Chains that could gain no more than this are not worth their hops.
constexpr double kWorthwhile = 1.01;

struct RelayOptions {
  std::uint64_t chunk_bytes = kRelayChunkBytes;
  bool always = false;         ///< Chains even where a plan without relays is as fast.
  bool islands_apart = false;  ///< Each island gets its copy from a source.
};

/// Receivers of a lane, island by island.
std::vector<std::vector<std::uint32_t>> by_island(const Lane& lane, const Ports& ports) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> groups;
  for (std::uint32_t copy = 0; copy < lane.receivers.size(); ++copy) {
    groups[ports.island_of(lane.receivers[copy])].push_back(copy);
  }
  std::vector<std::vector<std::uint32_t>> out;
  for (auto& [island, group] : groups) {
    out.push_back(std::move(group));
  }
  return out;
}

class RelayMaker {
 public:
  RelayMaker(PlanBuilder& builder, const FlowClasses& classes, const Ports& ports,
             const RelayOptions& options)
      : builder_(builder),
        classes_(classes),
        options_(options),
        lanes_(island_lanes(classes, ports, options.islands_apart)),
        splitter_(classes, lanes_, ports, true),
        index_(classes, lanes_) {
    for (const Lane& lane : lanes_) {
      groups_.push_back(by_island(lane, ports));
    }
  }

  void make() {
    count_waves();
    first_stage_.assign(builder_.problem().parameters().size(), 0);
    for (std::uint32_t g = 0; g < classes_.geometries().size(); ++g) {
      const GeometryFlow& geometry = classes_.geometries()[g];
      for_each_stretch(
          builder_, geometry, splitter_.cuts(g),
          [&](std::span<const std::uint32_t> stretch) { return pattern(geometry, stretch); },
          &first_stage_);
    }
  }

 private:
  /// As many waves as the busiest receiver gets chunks.
  void count_waves() {
    std::vector<std::uint64_t> of_set(classes_.set_count(), 0);
    for (const FlowClass& flow_class : classes_.classes()) {
      of_set[flow_class.receivers] += flow_class.bytes;
    }
    std::vector<std::uint64_t> ingress(static_cast<std::size_t>(classes_.world_size()), 0);
    std::uint64_t most = 0;
    for (std::uint32_t set = 0; set < of_set.size(); ++set) {
      for (const Rank rank : classes_.ranks(set)) {
        std::uint64_t& bytes = ingress[static_cast<std::size_t>(rank)];
        bytes += of_set[set];
        most = std::max(most, bytes);
      }
    }
    waves_ = static_cast<double>(std::max<std::uint64_t>(1, most / options_.chunk_bytes));
  }

  /// Bytes of a class in the parameters before @p parameter. @pre the parameter has some of it
  std::uint64_t bytes_before(std::uint32_t number, std::uint32_t parameter) {
    auto& runs = runs_of_class_[number];
    if (runs.empty()) {
      for (const FlowClasses::Share& share : classes_.shares(number)) {
        for (const std::uint32_t p : classes_.geometries()[share.geometry].group.parameters) {
          runs.emplace_back(p, share.bytes);
        }
      }
      std::sort(runs.begin(), runs.end());
      std::uint64_t before = 0;
      for (auto& [p, size] : runs) {
        before += std::exchange(size, before);
      }
    }
    return std::lower_bound(runs.begin(), runs.end(), std::pair(parameter, std::uint64_t{0}))
        ->second;
  }

  /// Waves from byte @p begin of what a holder serves of a lane to byte @p end: each holder sends
  /// what it serves evenly over all waves, so that the mix is always the same and no port is idle
  /// first and late in the end.
  double waves(const QuotaSplitter::Stretch& served, std::uint64_t begin, std::uint64_t end) const {
    return waves_ * static_cast<double>(end - begin) /
           static_cast<double>(served.end - served.begin);
  }

  /// The lane by which a geometry goes: of its largest class, that over NICs if there is one.
  std::uint32_t leading_lane(const GeometryFlow& geometry) const {
    std::map<std::uint32_t, std::uint64_t> bytes;
    std::uint32_t largest = GeometryFlow::kNone;
    for (std::size_t a = 0; a < geometry.atoms.size(); ++a) {
      const std::uint32_t number = geometry.class_of[a];
      if (number != GeometryFlow::kNone) {
        bytes[number] += static_cast<std::uint64_t>(geometry.atoms[a].box.volume());
        if (largest == GeometryFlow::kNone || bytes[number] > bytes[largest]) {
          largest = number;
        }
      }
    }
    const auto behind = std::upper_bound(
        lanes_.begin(), lanes_.end(), largest,
        [](std::uint32_t wanted, const Lane& lane) { return wanted < lane.class_number; });
    return largest == GeometryFlow::kNone ? GeometryFlow::kNone
                                          : static_cast<std::uint32_t>(behind - lanes_.begin()) - 1;
  }

  /// Sets the first wave of every parameter of @p stretch. A parameter that is planned alone counts
  /// its waves from 0; others share a pattern that counts from their own beginning.
  Pattern pattern(const GeometryFlow& geometry, std::span<const std::uint32_t> stretch) {
    const std::uint32_t parameter = stretch.front();
    const bool alone = stretch.size() == 1;
    const std::uint32_t leading = leading_lane(geometry);
    if (!alone && leading != GeometryFlow::kNone) {
      for (const std::uint32_t p : stretch) {
        const std::uint64_t at = bytes_before(lanes_[leading].class_number, p);
        const QuotaSplitter::Stretch served = splitter_.stretch(leading, at);
        first_stage_[p] = static_cast<std::uint32_t>(waves(served, served.begin, at));
      }
    }
    PatternMaker maker(geometry);
    std::map<std::uint32_t, std::uint32_t> turn;  // by receiver set, for the rotation
    std::vector<std::uint32_t> lanes_of_atom;
    std::vector<LanePart> parts;
    for (std::size_t a = 0; a < geometry.atoms.size(); ++a) {
      const std::uint32_t number = geometry.class_of[a];
      const std::uint64_t bytes = maker.begin_atom(geometry.atoms[a]);
      const std::uint64_t before =
          number == GeometryFlow::kNone ? 0 : bytes_before(number, parameter);
      std::uint32_t last_stage = 0;
      const std::vector<std::uint32_t> receivers = maker.remote_receivers();
      std::map<std::uint32_t, std::vector<std::uint32_t>> of_lane;  // copy -> holding
      for (std::size_t r = 0; r < receivers.size(); ++r) {
        of_lane[index_.of(number, r).first].push_back(receivers[r]);
      }
      for (const auto& [lane, holdings] : of_lane) {
        // A wave holds one piece for every receiver to enter at.
        const std::uint64_t chunk =
            std::max<std::uint64_t>({1, std::min(kLeastPieceBytes, options_.chunk_bytes),
                                     options_.chunk_bytes / holdings.size()});
        parts.clear();
        splitter_.split(lane, 0, parameter, geometry.offset[a], bytes, parts);
        for (const LanePart& part : parts) {
          const std::uint32_t from = maker.holding_of(lanes_[lane].holders[part.holder]);
          for (std::uint64_t begin = part.begin; begin < part.end; begin += chunk) {
            const std::uint64_t end = std::min(part.end, begin + chunk);
            const std::uint32_t box = maker.box(begin, end);
            if (box == PatternMaker::kNoBox) {
              continue;
            }
            const std::uint64_t at = before + geometry.offset[a] + begin;
            const QuotaSplitter::Stretch served = splitter_.stretch(lane, at);
            const auto wave =
                static_cast<std::uint32_t>(waves(served, alone ? served.begin : before, at));
            std::uint32_t& turns = turn[classes_.classes()[number].receivers];
            last_stage = std::max(last_stage, chain(maker, lane, holdings, from, box, wave, turns));
            ++turns;
          }
        }
      }
      maker.add_local_moves(0, last_stage + 1);
    }
    return std::move(maker).take();
  }

  /// @return the stage of the last hop.
  std::uint32_t chain(PatternMaker& maker, std::uint32_t lane,
                      const std::vector<std::uint32_t>& holdings, std::uint32_t from,
                      std::uint32_t box, std::uint32_t stage, std::uint32_t turn) const {
    const auto& groups = groups_[lane];
    std::uint32_t last = stage;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const auto& members = groups[(i + turn) % groups.size()];
      const std::size_t entry = turn / groups.size() % members.size();
      std::uint32_t at = from;
      for (std::uint32_t hop = 0; hop < members.size(); ++hop) {
        const std::uint32_t next = holdings[members[(entry + hop) % members.size()]];
        maker.move(box, at, next, stage + hop);
        last = std::max(last, stage + hop);
        if (hop == 0) {
          from = next;
        }
        at = next;
      }
      ++stage;
    }
    return last;
  }

  PlanBuilder& builder_;
  const FlowClasses& classes_;
  RelayOptions options_;
  std::vector<Lane> lanes_;
  QuotaSplitter splitter_;
  LaneIndex index_;
  std::vector<std::vector<std::vector<std::uint32_t>>> groups_;  // [lane]
  double waves_ = 1;
  std::map<std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint64_t>>> runs_of_class_;
  std::vector<std::uint32_t> first_stage_;
};

class RelayPlanner final : public Planner {
 public:
  explicit RelayPlanner(const RelayOptions& options) : options_(options) {}
  std::string_view name() const noexcept override { return "relay"; }

 private:
  void do_plan(const Topology& topology, PlanBuilder& builder) const override {
    const FlowClasses classes(builder.problem());
    const Bounds bounds = bounds_of(classes, topology);
    const Ports ports(topology);
    if (!options_.always && bounds.direct_seconds() <= bounds.seconds() * kWorthwhile) {
      const std::vector<Lane> lanes = island_lanes(classes, ports);
      add_direct(builder, classes, lanes, QuotaSplitter(classes, lanes, ports, false));
      return;
    }
    RelayMaker(builder, classes, ports, options_).make();
  }

  RelayOptions options_;
};

}  // namespace

void add_planner_relay(Registries& registries) {
  registries.planners.add(
      "relay",
      "receivers pass chunks on along rotated chains; chunk_bytes=N, chains=auto|always, "
      "islands=chained|apart",
      [](const PlannerContext& context) {
        constexpr std::string_view kWho = "planner 'relay'";
        require_known_options(kWho, context.options, {"chunk_bytes", "chains", "islands"});
        RelayOptions options;
        options.chunk_bytes =
            positive_option(kWho, context.options, "chunk_bytes", kRelayChunkBytes);
        options.always =
            choice_option(kWho, context.options, "chains", {"auto", "always"}) == "always";
        options.islands_apart =
            choice_option(kWho, context.options, "islands", {"chained", "apart"}) == "apart";
        return std::make_unique<RelayPlanner>(options);
      });
}

}  // namespace m2n
