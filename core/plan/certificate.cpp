// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/certificate.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <unordered_map>

#include "core/plan/traffic.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

/// Moves between ranks on the longest chain of any pattern. A relay waits for what it passes on:
/// the same box in the same holding, or, where a box was put together, the whole holding.
std::uint32_t longest_chain(const Plan& plan) {
  std::uint32_t longest = 0;
  for (const Pattern& pattern : plan.patterns) {
    const std::uint32_t sources = pattern.geometry.source_count();
    const bool relays = std::any_of(pattern.moves.begin(), pattern.moves.end(),
                                    [&](const Move& move) { return move.from >= sources; });
    if (!relays) {
      for (const Move& move : pattern.moves) {
        if (pattern.rank_of(move.from) != pattern.rank_of(move.to)) {
          longest = std::max(longest, 1U);
          break;
        }
      }
      continue;
    }
    std::unordered_map<std::uint64_t, std::uint32_t> of_box;
    std::unordered_map<std::uint32_t, std::uint32_t> of_holding;
    const auto key = [](std::uint32_t holding, std::uint32_t box) {
      return std::uint64_t{holding} << 32 | box;
    };
    for (const Move& move : pattern.moves) {
      std::uint32_t depth = 0;
      if (move.from >= sources) {
        const auto exact = of_box.find(key(move.from, move.box));
        depth = exact != of_box.end() ? exact->second : of_holding[move.from];
      }
      depth += pattern.rank_of(move.from) != pattern.rank_of(move.to) ? 1 : 0;
      of_box[key(move.to, move.box)] = depth;
      std::uint32_t& whole = of_holding[move.to];
      whole = std::max(whole, depth);
      longest = std::max(longest, depth);
    }
  }
  return longest;
}

std::string seconds_text(double seconds) {
  char text[32];
  const char* unit = seconds >= 1 ? "s" : seconds >= 1e-3 ? "ms" : "us";
  const double scale = seconds >= 1 ? 1 : seconds >= 1e-3 ? 1e3 : 1e6;
  (void)std::snprintf(text, sizeof text, "%.4g %s", seconds * scale, unit);
  return text;
}

std::string number_text(double value) {
  char text[32];
  (void)std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

std::string bytes_text(std::uint64_t bytes) {
  char text[48];
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1'000'000'000) {
    (void)std::snprintf(text, sizeof text, "%.3f GB", value / 1e9);
  } else if (bytes >= 1'000'000) {
    (void)std::snprintf(text, sizeof text, "%.3f MB", value / 1e6);
  } else {
    (void)std::snprintf(text, sizeof text, "%llu B", static_cast<unsigned long long>(bytes));
  }
  return text;
}

boost::json::array json_bounds(const std::vector<Bound>& bounds) {
  boost::json::array out;
  for (const Bound& bound : bounds) {
    out.push_back({{"name", bound.name},
                   {"practical_s", bound.seconds},
                   {"hard_s", bound.hard_seconds},
                   {"binds", bound.binds}});
  }
  return out;
}

void append_bounds(std::string& text, const std::vector<Bound>& bounds) {
  for (const Bound& bound : bounds) {
    std::string line = "  " + bound.name;
    line.resize(std::max<std::size_t>(line.size() + 1, 24), ' ');
    line += seconds_text(bound.seconds);
    line.resize(std::max<std::size_t>(line.size() + 1, 38), ' ');
    line += "hard " + seconds_text(bound.hard_seconds);
    line.resize(std::max<std::size_t>(line.size() + 1, 56), ' ');
    text += line + bound.binds + '\n';
  }
}

}  // namespace

Certificate certify(const Plan& plan, const Problem& problem, const Topology& topology) {
  return certify(plan, problem, topology, FlowClasses(problem));
}

Certificate certify(const Plan& plan, const Problem& problem, const Topology& topology,
                    const FlowClasses& classes) {
  Certificate result;
  result.bounds = bounds_of(classes, topology);
  result.summary = summarize(plan, problem);
  const TrafficMatrix traffic = traffic_matrix(plan, problem);
  const Ports ports(topology);
  std::vector<std::uint64_t> load(ports.size(), 0);
  std::vector<std::uint32_t> path;
  double memory_seconds = 0;
  for (Rank from = 0; from < problem.world_size(); ++from) {
    std::uint64_t touched = 0;
    for (Rank to = 0; to < problem.world_size(); ++to) {
      const std::uint64_t bytes = traffic(from, to);
      touched += (from == to ? 2 * bytes : bytes + traffic(to, from));
      if (bytes == 0 || from == to) {
        continue;
      }
      path.clear();
      ports.path(from, to, path);
      for (const std::uint32_t port : path) {
        load[port] = checked_add_bytes(load[port], bytes);
      }
    }
    if (topology.memory_gb_per_s > 0) {
      const double seconds = static_cast<double>(touched) / (topology.memory_gb_per_s * 1e9);
      if (seconds > memory_seconds) {
        memory_seconds = seconds;
        result.binds = "rank " + std::to_string(from) + " memory";
      }
    }
  }
  for (std::uint32_t port = 0; port < ports.size(); ++port) {
    if (load[port] > 0) {
      result.ports.push_back(
          {ports.name(port), load[port], static_cast<double>(load[port]) / ports.rate(port)});
    }
  }
  std::stable_sort(result.ports.begin(), result.ports.end(),
                   [](const PortLoad& a, const PortLoad& b) { return a.seconds > b.seconds; });
  result.hops = longest_chain(plan);
  result.seconds = memory_seconds;
  if (!result.ports.empty() && result.ports.front().seconds >= memory_seconds) {
    result.seconds = result.ports.front().seconds;
    result.binds = result.ports.front().name;
  }
  result.seconds += result.hops * topology.latency_us * 1e-6;
  if (result.binds.empty()) {
    result.binds = "nothing moves";
  }
  const double bound = result.bounds.seconds();
  const double direct = result.bounds.direct_seconds();
  result.ratio = bound > 0 ? result.seconds / bound : 1;
  result.direct_ratio = direct > 0 ? result.seconds / direct : 1;
  return result;
}

std::string to_text(const Certificate& c) {
  const Bound& best = c.bounds.best();
  const Bound& direct = c.bounds.best_direct();
  std::string text;
  text += "bytes between ranks " + bytes_text(c.summary.bytes) + ", local " +
          bytes_text(c.summary.local_bytes) + ", messages " + std::to_string(c.summary.messages) +
          ", regions " + std::to_string(c.summary.regions) + ", stages " +
          std::to_string(c.summary.stages) + ", hops " + std::to_string(c.hops) + '\n';
  text += "largest egress " + bytes_text(c.summary.max_egress_bytes()) + ", ingress " +
          bytes_text(c.summary.max_ingress_bytes()) + ", staging " +
          bytes_text(c.summary.scratch_bytes) + '\n';
  text += "plan            " + seconds_text(c.seconds) + "  (" + c.binds + ")\n";
  text += "bound           " + seconds_text(best.seconds) + "  (" + best.name + ": " + best.binds +
          "), hard " + seconds_text(c.bounds.hard_seconds()) + ", plan / bound " +
          number_text(c.ratio) + '\n';
  text += "without relays  " + seconds_text(direct.seconds) + "  (" + direct.name + ": " +
          direct.binds + "), hard " + seconds_text(c.bounds.direct_hard_seconds()) +
          ", plan / bound " + number_text(c.direct_ratio) + '\n';
  text += "bounds\n";
  append_bounds(text, c.bounds.any);
  append_bounds(text, c.bounds.direct);
  return text;
}

std::string to_json(const Certificate& c) {
  boost::json::array ports;
  for (const PortLoad& port : c.ports) {
    ports.push_back({{"port", port.name}, {"bytes", port.bytes}, {"s", port.seconds}});
  }
  const boost::json::object object{{"time_s", c.seconds},
                                   {"binds", c.binds},
                                   {"bound_s", c.bounds.seconds()},
                                   {"bound_name", c.bounds.best().name},
                                   {"bound_binds", c.bounds.best().binds},
                                   {"hard_bound_s", c.bounds.hard_seconds()},
                                   {"direct_bound_s", c.bounds.direct_seconds()},
                                   {"direct_hard_bound_s", c.bounds.direct_hard_seconds()},
                                   {"ratio", c.ratio},
                                   {"direct_ratio", c.direct_ratio},
                                   {"bounds", json_bounds(c.bounds.any)},
                                   {"direct_bounds", json_bounds(c.bounds.direct)},
                                   {"bytes", c.summary.bytes},
                                   {"local_bytes", c.summary.local_bytes},
                                   {"messages", c.summary.messages},
                                   {"regions", c.summary.regions},
                                   {"stages", c.summary.stages},
                                   {"hops", c.hops},
                                   {"max_egress_bytes", c.summary.max_egress_bytes()},
                                   {"max_ingress_bytes", c.summary.max_ingress_bytes()},
                                   {"staging_bytes", c.summary.scratch_bytes},
                                   {"ports", std::move(ports)}};
  return boost::json::serialize(object);
}

}  // namespace m2n
