// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Lower bounds on the time of every plan. Each is a cut: bytes that must pass some ports.

#include <algorithm>
#include <cmath>
#include <set>

#include "core/plan/certificate.hpp"
#include "core/plan/flow.hpp"

namespace m2n {
namespace {

using Ports32 = std::vector<std::uint32_t>;

std::string percent(double part, double whole) {
  const double share = whole > 0 ? 100 * part / whole : 0;
  std::string text = std::to_string(std::llround(share * 10));
  text.insert(text.size() - 1, text.size() == 1 ? "0." : ".");
  return text + " %";
}

/// "rank 37 egress", "3 ports {rank 0 egress, rank 8 egress, ...}".
std::string name_ports(const Ports& ports, const Ports32& set) {
  if (set.size() == 1) {
    return ports.name(set.front());
  }
  constexpr std::size_t kShown = 8;
  std::string text = std::to_string(set.size()) + " ports {";
  for (std::size_t i = 0; i < std::min(set.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + ports.name(set[i]);
  }
  return text + (set.size() > kShown ? ", ...}" : "}");
}

std::vector<double> rates_of(const Ports& ports, bool hard) {
  std::vector<double> rates;
  rates.reserve(ports.size());
  for (std::uint32_t port = 0; port < ports.size(); ++port) {
    rates.push_back(hard ? ports.nominal_rate(port) : ports.rate(port));
  }
  return rates;
}

class BoundMaker {
 public:
  BoundMaker(const FlowClasses& classes, const Topology& topology)
      : classes_(classes), topology_(topology), ports_(topology) {
    for (std::uint32_t set = 0; set < classes.set_count(); ++set) {
      std::vector<std::uint32_t> islands;
      for (const Rank rank : classes.ranks(set)) {
        islands.push_back(ports_.island_of(rank));
      }
      std::sort(islands.begin(), islands.end());
      islands.erase(std::unique(islands.begin(), islands.end()), islands.end());
      islands_of_set_.push_back(std::move(islands));
    }
    island_nics_.resize(ports_.islands());
    for (Rank rank = 0; rank < topology.rank_count(); ++rank) {
      if (ports_.nic_out(rank) != Ports::kNone) {
        island_nics_[ports_.island_of(rank)].push_back(ports_.nic_out(rank));
      }
    }
    for (Ports32& nics : island_nics_) {
      std::sort(nics.begin(), nics.end());
      nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    }
  }

  Bounds make() {
    std::uint64_t moved = 0;
    for (const FlowClass& c : classes_.classes()) {
      moved = checked_add_bytes(moved, c.bytes);
    }
    rank_ingress();
    rank_egress();
    if (several()) {
      island_ingress();
      island_egress();
      uplinks();
    }
    work();
    memory();
    if (moved > 0) {
      const double latency = topology_.latency_us * 1e-6;
      result_.any.push_back({"B8 latency", "one message", latency, latency});
    }
    if (moved > 0) {
      direct_egress();
      direct_ingress();
    }
    return std::move(result_);
  }

 private:
  bool several() const { return ports_.islands() > 1; }

  /// Ports by which bytes leave (or reach) a rank.
  void ports_of_rank(Rank rank, bool out, Ports32& to) const {
    // A rank alone in its island has nobody to link to.
    if (!several() || topology_.islands[ports_.island_of(rank)].size() > 1) {
      to.push_back(out ? Ports::link_out(rank) : Ports::link_in(rank));
    }
    if (several()) {
      to.push_back(out ? ports_.nic_out(rank) : ports_.nic_in(rank));
    }
  }

  double rate(const Ports32& set, bool hard) const {
    double sum = 0;
    for (const std::uint32_t port : set) {
      sum += hard ? ports_.nominal_rate(port) : ports_.rate(port);
    }
    return sum;
  }

  /// Unique bytes that each rank must receive.
  std::vector<std::uint64_t> needed() const {
    std::vector<std::uint64_t> of_set(classes_.set_count(), 0);
    for (const FlowClass& c : classes_.classes()) {
      of_set[c.receivers] += c.bytes;
    }
    std::vector<std::uint64_t> of_rank(static_cast<std::size_t>(classes_.world_size()), 0);
    for (std::uint32_t set = 0; set < of_set.size(); ++set) {
      if (of_set[set] > 0) {
        for (const Rank rank : classes_.ranks(set)) {
          of_rank[static_cast<std::size_t>(rank)] += of_set[set];
        }
      }
    }
    return of_rank;
  }

  void rank_ingress() {
    const std::vector<std::uint64_t> bytes = needed();
    Bound bound{"B1 rank ingress", "", 0, 0};
    for (Rank rank = 0; rank < classes_.world_size(); ++rank) {
      const auto load = static_cast<double>(bytes[static_cast<std::size_t>(rank)]);
      Ports32 in;
      ports_of_rank(rank, false, in);
      bound.hard_seconds = std::max(bound.hard_seconds, load / rate(in, true));
      if (load / rate(in, false) > bound.seconds) {
        bound.seconds = load / rate(in, false);
        bound.binds = "rank " + std::to_string(rank) + " ingress";
      }
    }
    keep(std::move(bound), result_.any);
  }

  void keep(Bound bound, std::vector<Bound>& to) {
    if (bound.seconds > 0) {
      to.push_back(std::move(bound));
    }
  }

  /// Hall sets of @p demands over the ports, at both kinds of rate.
  template <class Words>
  Bound hall(std::string name, const std::vector<FlowDemand>& demands, Words words) const {
    double total = 0;
    for (const FlowDemand& demand : demands) {
      total += static_cast<double>(demand.bytes);
    }
    const MinMaxFlow flow = min_max_flow(demands, rates_of(ports_, false));
    const MinMaxFlow hard = min_max_flow(demands, rates_of(ports_, true));
    return {std::move(name), words(flow, total), flow.seconds, hard.seconds};
  }

  /// "sources {0, 8, 16} hold 61.2 % of the bytes".
  std::string name_holders(const MinMaxFlow& flow, double total) const {
    std::set<Rank> ranks;
    const std::set<std::uint32_t> binding(flow.binding_ports.begin(), flow.binding_ports.end());
    for (Rank rank = 0; rank < classes_.world_size(); ++rank) {
      if (binding.contains(Ports::link_out(rank)) ||
          (several() && binding.contains(ports_.nic_out(rank)))) {
        ranks.insert(rank);
      }
    }
    std::string text = ranks.size() == 1 ? "source " : "sources {";
    constexpr std::size_t kShown = 8;
    std::size_t shown = 0;
    for (const Rank rank : ranks) {
      if (shown == kShown) {
        text += ", ... " + std::to_string(ranks.size()) + " in all";
        break;
      }
      text += (shown++ == 0 ? "" : ", ") + std::to_string(rank);
    }
    text += ranks.size() == 1 ? " holds " : "} hold ";
    return text + percent(flow.binding_bytes, total) + " of the bytes";
  }

  void rank_egress() {
    // Whatever is passed on later, each byte leaves one of its holders at least once.
    std::vector<std::uint64_t> of_set(classes_.set_count(), 0);
    for (const FlowClass& c : classes_.classes()) {
      of_set[c.holders] += c.bytes;
    }
    std::vector<FlowDemand> demands;
    for (std::uint32_t set = 0; set < of_set.size(); ++set) {
      if (of_set[set] > 0) {
        demands.push_back({of_set[set], {}});
        for (const Rank rank : classes_.ranks(set)) {
          ports_of_rank(rank, true, demands.back().ports);
        }
      }
    }
    keep(hall("B2 rank egress", demands,
              [&](const MinMaxFlow& flow, double total) { return name_holders(flow, total); }),
         result_.any);
  }

  bool has_island(std::uint32_t set, std::uint32_t island) const {
    const auto& islands = islands_of_set_[set];
    return std::binary_search(islands.begin(), islands.end(), island);
  }

  void island_ingress() {
    std::vector<double> bytes(ports_.islands(), 0);
    for (const FlowClass& c : classes_.classes()) {
      for (const std::uint32_t island : islands_of_set_[c.receivers]) {
        if (!has_island(c.holders, island)) {
          bytes[island] += static_cast<double>(c.bytes);
        }
      }
    }
    Bound bound{"B3 island ingress", "", 0, 0};
    for (std::uint32_t island = 0; island < ports_.islands(); ++island) {
      const double practical = bytes[island] / rate(island_nics_[island], false);
      bound.hard_seconds =
          std::max(bound.hard_seconds, bytes[island] / rate(island_nics_[island], true));
      if (practical > bound.seconds) {
        bound.seconds = practical;
        bound.binds = "island " + std::to_string(island) + " ingress";
      }
    }
    keep(std::move(bound), result_.any);
  }

  void island_egress() {
    std::vector<FlowDemand> demands;
    for (const FlowClass& c : classes_.classes()) {
      const auto& from = islands_of_set_[c.holders];
      const auto& to = islands_of_set_[c.receivers];
      if (std::includes(from.begin(), from.end(), to.begin(), to.end())) {
        continue;
      }
      demands.push_back({c.bytes, {}});
      for (const std::uint32_t island : from) {
        demands.back().ports.insert(demands.back().ports.end(), island_nics_[island].begin(),
                                    island_nics_[island].end());
      }
    }
    keep(hall("B4 island egress", demands,
              [&](const MinMaxFlow& flow, double) {
                return name_ports(ports_, flow.binding_ports);
              }),
         result_.any);
  }

  void uplinks() {
    for (std::size_t u = 0; u < topology_.uplinks.size(); ++u) {
      const Uplink& uplink = topology_.uplinks[u];
      const auto inside = [&](Rank rank) {
        return std::binary_search(uplink.ranks.begin(), uplink.ranks.end(), rank);
      };
      // Inside an island that the set cuts in two, bytes pass its edge without the uplink.
      bool whole_islands = true;
      for (const auto& island : topology_.islands) {
        const auto count = std::count_if(island.begin(), island.end(), inside);
        whole_islands =
            whole_islands && (count == 0 || count == static_cast<std::ptrdiff_t>(island.size()));
      }
      if (!whole_islands) {
        continue;
      }
      enum : std::uint8_t { some_inside = 1, some_outside = 2 };
      std::vector<std::uint8_t> where(classes_.set_count(), 0);
      for (std::uint32_t set = 0; set < where.size(); ++set) {
        for (const Rank rank : classes_.ranks(set)) {
          where[set] |= inside(rank) ? some_inside : some_outside;
        }
      }
      double in = 0;
      double out = 0;
      for (const FlowClass& c : classes_.classes()) {
        const auto bytes = static_cast<double>(c.bytes);
        in +=
            where[c.holders] == some_outside && (where[c.receivers] & some_inside) != 0 ? bytes : 0;
        out +=
            where[c.holders] == some_inside && (where[c.receivers] & some_outside) != 0 ? bytes : 0;
      }
      const double seconds = std::max(in, out) / (uplink.gb_per_s * 1e9);
      keep({"B5 uplink", "uplink '" + uplink.name + (in >= out ? "' ingress" : "' egress"), seconds,
            seconds},
           result_.any);
    }
  }

  void work() {
    // Every copy that is received is sent by somebody, and only ranks of the world send.
    double copies = 0;
    for (const FlowClass& c : classes_.classes()) {
      copies +=
          static_cast<double>(c.bytes) * static_cast<double>(classes_.ranks(c.receivers).size());
    }
    std::set<std::uint32_t> all;
    for (Rank rank = 0; rank < classes_.world_size(); ++rank) {
      Ports32 out;
      ports_of_rank(rank, true, out);
      all.insert(out.begin(), out.end());
    }
    const Ports32 set(all.begin(), all.end());
    keep({"B6 work", "all ranks together", copies / rate(set, false), copies / rate(set, true)},
         result_.any);
  }

  void memory() {
    if (topology_.memory_gb_per_s <= 0) {
      return;
    }
    const std::vector<std::uint64_t> bytes = needed();
    Bound bound{"B7 memory", "", 0, 0};
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
      const double touched =
          static_cast<double>(bytes[rank]) + 2 * static_cast<double>(classes_.local_bytes()[rank]);
      const double seconds = touched / (topology_.memory_gb_per_s * 1e9);
      if (seconds > bound.seconds) {
        bound.seconds = bound.hard_seconds = seconds;
        bound.binds = "rank " + std::to_string(rank) + " memory";
      }
    }
    keep(std::move(bound), result_.any);
  }

  /// Splits receivers by whether a holder shares their island.
  struct Split {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> near;  // island, receivers there
    std::uint64_t far = 0;
  };
  Split split(const FlowClass& c) const {
    Split result;
    std::vector<std::uint64_t> count(islands_of_set_[c.receivers].size(), 0);
    const auto& islands = islands_of_set_[c.receivers];
    for (const Rank rank : classes_.ranks(c.receivers)) {
      const auto at = std::lower_bound(islands.begin(), islands.end(), ports_.island_of(rank));
      ++count[static_cast<std::size_t>(at - islands.begin())];
    }
    for (std::size_t i = 0; i < islands.size(); ++i) {
      if (has_island(c.holders, islands[i])) {
        result.near.emplace_back(islands[i], count[i]);
      } else {
        result.far += count[i];
      }
    }
    return result;
  }

  void direct_egress() {
    std::vector<FlowDemand> demands;
    for (const FlowClass& c : classes_.classes()) {
      if (!several()) {  // no need to look at each receiver
        demands.push_back({c.bytes * classes_.ranks(c.receivers).size(), {}});
        for (const Rank rank : classes_.ranks(c.holders)) {
          demands.back().ports.push_back(Ports::link_out(rank));
        }
        continue;
      }
      const Split receivers = split(c);
      for (const auto& [island, count] : receivers.near) {
        demands.push_back({c.bytes * count, {}});
        for (const Rank rank : classes_.ranks(c.holders)) {
          demands.back().ports.push_back(ports_.island_of(rank) == island ? Ports::link_out(rank)
                                                                          : ports_.nic_out(rank));
        }
      }
      if (receivers.far > 0) {
        demands.push_back({c.bytes * receivers.far, {}});
        for (const Rank rank : classes_.ranks(c.holders)) {
          demands.back().ports.push_back(ports_.nic_out(rank));
        }
      }
    }
    keep(hall("B6d direct egress", demands,
              [&](const MinMaxFlow& flow, double total) { return name_holders(flow, total); }),
         result_.direct);
  }

  void direct_ingress() {
    if (!several()) {
      return;  // B1 says the same
    }
    enum { link_only, nic_only, either, kinds };
    std::vector<std::array<std::uint64_t, kinds>> bytes(
        static_cast<std::size_t>(classes_.world_size()), {0, 0, 0});
    for (const FlowClass& c : classes_.classes()) {
      for (const Rank rank : classes_.ranks(c.receivers)) {
        const std::uint32_t island = ports_.island_of(rank);
        const bool near = has_island(c.holders, island);
        const bool far = !near || islands_of_set_[c.holders].size() > 1;
        bytes[static_cast<std::size_t>(rank)][near ? (far ? either : link_only) : nic_only] +=
            c.bytes;
      }
    }
    std::vector<FlowDemand> demands;
    for (Rank rank = 0; rank < classes_.world_size(); ++rank) {
      const auto& of_rank = bytes[static_cast<std::size_t>(rank)];
      demands.push_back({of_rank[link_only], {Ports::link_in(rank)}});
      demands.push_back({of_rank[nic_only], {ports_.nic_in(rank)}});
      demands.push_back({of_rank[either], {Ports::link_in(rank), ports_.nic_in(rank)}});
    }
    keep(hall("B3d direct ingress", demands,
              [&](const MinMaxFlow& flow, double) {
                return name_ports(ports_, flow.binding_ports);
              }),
         result_.direct);
  }

  const FlowClasses& classes_;
  const Topology& topology_;
  Ports ports_;
  std::vector<std::vector<std::uint32_t>> islands_of_set_;
  std::vector<Ports32> island_nics_;
  Bounds result_;
};

const Bound kNothing{"none", "nothing moves", 0, 0};

const Bound& larger(const Bound& a, const Bound& b) { return b.seconds > a.seconds ? b : a; }

}  // namespace

const Bound& Bounds::best() const {
  const Bound* found = &kNothing;
  for (const Bound& bound : any) {
    found = &larger(*found, bound);
  }
  return *found;
}

const Bound& Bounds::best_direct() const {
  const Bound* found = &best();
  for (const Bound& bound : direct) {
    found = &larger(*found, bound);
  }
  return *found;
}

double Bounds::seconds() const { return best().seconds; }
double Bounds::direct_seconds() const { return best_direct().seconds; }

double Bounds::hard_seconds() const {
  double seconds = 0;
  for (const Bound& bound : any) {
    seconds = std::max(seconds, bound.hard_seconds);
  }
  return seconds;
}

double Bounds::direct_hard_seconds() const {
  double seconds = hard_seconds();
  for (const Bound& bound : direct) {
    seconds = std::max(seconds, bound.hard_seconds);
  }
  return seconds;
}

Bounds bounds_of(const FlowClasses& classes, const Topology& topology) {
  topology.require(classes.world_size());
  return BoundMaker(classes, topology).make();
}

}  // namespace m2n
