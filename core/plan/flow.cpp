// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/flow.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"

namespace m2n {
namespace {

// Capacities are bytes times a sum of rates: up to 2^50 * 2^45, past 64 bits.
__extension__ typedef __int128 Wide;

constexpr double kRateUnit = 1000;  // bytes a second

/// Maximum flow from demands to ports: Dinic's algorithm on three layers and their reverse edges.
class BipartiteFlow {
 public:
  BipartiteFlow(const std::vector<const FlowDemand*>& demands, std::size_t ports)
      : demands_(demands), port_edges_(ports), port_left_(ports) {
    for (std::uint32_t d = 0; d < demands.size(); ++d) {
      first_edge_.push_back(static_cast<std::uint32_t>(edge_port_.size()));
      for (const std::uint32_t port : demands[d]->ports) {
        port_edges_[port].push_back(static_cast<std::uint32_t>(edge_port_.size()));
        edge_port_.push_back(port);
        edge_demand_.push_back(d);
      }
    }
    first_edge_.push_back(static_cast<std::uint32_t>(edge_port_.size()));
    flow_.resize(edge_port_.size());
    demand_left_.resize(demands.size());
  }

  /// @param factor  Demands are their bytes times this. @return whether all of it flows.
  bool solve(Wide factor, const std::vector<Wide>& capacity) {
    port_left_ = capacity;
    std::fill(flow_.begin(), flow_.end(), 0);
    for (std::size_t d = 0; d < demands_.size(); ++d) {
      demand_left_[d] = static_cast<Wide>(demands_[d]->bytes) * factor;
    }
    push_even_shares();
    while (level()) {
      next_edge_ = first_edge_;
      next_back_.assign(port_edges_.size(), 0);
      for (std::uint32_t d = 0; d < demands_.size(); ++d) {
        if (demand_left_[d] > 0) {
          demand_left_[d] -= push_demand(d, demand_left_[d]);
        }
      }
    }
    return std::all_of(demand_left_.begin(), demand_left_.end(),
                       [](const Wide& left) { return left == 0; });
  }

  /// After a solve() that failed: the source's side of the minimum cut.
  bool demand_in_cut(std::uint32_t d) const { return demand_level_[d] != kFar; }
  bool port_in_cut(std::uint32_t port) const { return port_level_[port] != kFar; }

  Wide flow(std::uint32_t d, std::size_t option) const { return flow_[first_edge_[d] + option]; }

 private:
  static constexpr std::uint32_t kFar = std::numeric_limits<std::uint32_t>::max();

  void push_even_shares() {
    for (std::uint32_t d = 0; d < demands_.size(); ++d) {
      const std::uint32_t count = first_edge_[d + 1] - first_edge_[d];
      const Wide share = demand_left_[d] / count;
      for (std::uint32_t e = first_edge_[d]; e < first_edge_[d + 1]; ++e) {
        const Wide pushed = std::min(share, port_left_[edge_port_[e]]);
        flow_[e] += pushed;
        port_left_[edge_port_[e]] -= pushed;
        demand_left_[d] -= pushed;
      }
    }
  }

  /// Distances from the demands that have bytes left. @return whether a port with room is reached.
  bool level() {
    demand_level_.assign(demands_.size(), kFar);
    port_level_.assign(port_edges_.size(), kFar);
    std::vector<std::uint32_t> queue;
    for (std::uint32_t d = 0; d < demands_.size(); ++d) {
      if (demand_left_[d] > 0) {
        demand_level_[d] = 0;
        queue.push_back(d);
      }
    }
    bool reached = false;
    for (std::size_t at = 0; at < queue.size(); ++at) {
      const std::uint32_t d = queue[at];
      for (std::uint32_t e = first_edge_[d]; e < first_edge_[d + 1]; ++e) {
        const std::uint32_t port = edge_port_[e];
        if (port_level_[port] != kFar) {
          continue;
        }
        port_level_[port] = demand_level_[d] + 1;
        reached = reached || port_left_[port] > 0;
        for (const std::uint32_t back : port_edges_[port]) {
          const std::uint32_t other = edge_demand_[back];
          if (flow_[back] > 0 && demand_level_[other] == kFar) {
            demand_level_[other] = port_level_[port] + 1;
            queue.push_back(other);
          }
        }
      }
    }
    return reached;
  }

  Wide push_demand(std::uint32_t d, Wide limit) {
    Wide sent = 0;
    for (std::uint32_t& e = next_edge_[d]; e < first_edge_[d + 1]; ++e) {
      const std::uint32_t port = edge_port_[e];
      if (port_level_[port] != demand_level_[d] + 1) {
        continue;
      }
      const Wide pushed = push_port(port, limit - sent);
      flow_[e] += pushed;
      sent += pushed;
      if (sent == limit) {
        break;
      }
    }
    return sent;
  }

  Wide push_port(std::uint32_t port, Wide limit) {
    Wide sent = std::min(limit, port_left_[port]);
    port_left_[port] -= sent;
    for (std::uint32_t& i = next_back_[port]; sent < limit && i < port_edges_[port].size(); ++i) {
      const std::uint32_t back = port_edges_[port][i];
      const std::uint32_t other = edge_demand_[back];
      if (flow_[back] == 0 || demand_level_[other] != port_level_[port] + 1) {
        continue;
      }
      const Wide pushed = push_demand(other, std::min(limit - sent, flow_[back]));
      flow_[back] -= pushed;
      sent += pushed;
      if (sent == limit) {
        break;
      }
    }
    return sent;
  }

  const std::vector<const FlowDemand*>& demands_;
  std::vector<std::uint32_t> first_edge_;
  std::vector<std::uint32_t> edge_port_;
  std::vector<std::uint32_t> edge_demand_;
  std::vector<Wide> flow_;
  std::vector<Wide> demand_left_;
  std::vector<std::vector<std::uint32_t>> port_edges_;
  std::vector<Wide> port_left_;
  std::vector<std::uint32_t> demand_level_;
  std::vector<std::uint32_t> port_level_;
  std::vector<std::uint32_t> next_edge_;
  std::vector<std::uint32_t> next_back_;
};

/// bytes / rate, and the ports that it is about.
struct Bottleneck {
  Wide bytes = 0;
  Wide rate = 1;
  std::vector<std::uint32_t> ports;

  bool above(const Bottleneck& other) const { return bytes * other.rate > other.bytes * rate; }
};

}  // namespace

MinMaxFlow min_max_flow(std::span<const FlowDemand> demands, std::span<const double> rates) {
  std::vector<Wide> rate(rates.size());
  for (std::size_t p = 0; p < rates.size(); ++p) {
    expects(rates[p] > 0, "rates above 0");
    rate[p] = std::max<Wide>(1, std::llround(rates[p] / kRateUnit));
  }
  // Demands without a choice are a load that every solution has.
  std::vector<Wide> fixed(rates.size(), 0);
  std::vector<bool> used(rates.size(), false);
  std::vector<const FlowDemand*> free;
  std::vector<std::uint32_t> free_index;
  Bottleneck all;
  all.rate = 0;
  for (std::uint32_t d = 0; d < demands.size(); ++d) {
    if (demands[d].bytes == 0) {
      continue;
    }
    expects(!demands[d].ports.empty(), "a port for every demand");
    for (const std::uint32_t port : demands[d].ports) {
      used[port] = true;
    }
    all.bytes += demands[d].bytes;
    if (demands[d].ports.size() == 1) {
      fixed[demands[d].ports.front()] += demands[d].bytes;
    } else {
      free.push_back(&demands[d]);
      free_index.push_back(d);
    }
  }
  MinMaxFlow result;
  result.bytes.resize(demands.size());
  if (all.bytes == 0) {
    for (std::size_t d = 0; d < demands.size(); ++d) {
      result.bytes[d].assign(demands[d].ports.size(), 0);
    }
    return result;
  }
  for (std::uint32_t port = 0; port < rates.size(); ++port) {
    if (used[port]) {
      all.rate += rate[port];
      all.ports.push_back(port);
    }
  }
  Bottleneck time = all;  // each candidate is a lower bound; the largest is the answer
  for (std::uint32_t port = 0; port < rates.size(); ++port) {
    const Bottleneck alone{fixed[port], rate[port], {port}};
    if (alone.above(time)) {
      time = alone;
    }
  }
  BipartiteFlow flow(free, rates.size());
  std::vector<Wide> capacity(rates.size());
  for (;;) {
    for (std::size_t port = 0; port < rates.size(); ++port) {
      capacity[port] = rate[port] * time.bytes - fixed[port] * time.rate;
    }
    if (flow.solve(time.rate, capacity)) {
      break;
    }
    Bottleneck cut;
    cut.rate = 0;
    for (std::uint32_t port = 0; port < rates.size(); ++port) {
      if (flow.port_in_cut(port)) {
        cut.rate += rate[port];
        cut.bytes += fixed[port];
        cut.ports.push_back(port);
      }
    }
    for (std::uint32_t d = 0; d < free.size(); ++d) {
      if (flow.demand_in_cut(d)) {
        cut.bytes += free[d]->bytes;
      }
    }
    time = std::move(cut);
  }
  result.seconds = static_cast<double>(time.bytes) / (static_cast<double>(time.rate) * kRateUnit);
  result.binding_ports = std::move(time.ports);
  result.binding_bytes = static_cast<double>(time.bytes);
  for (std::size_t d = 0; d < demands.size(); ++d) {
    result.bytes[d].assign(demands[d].ports.size(), 0);
    if (demands[d].ports.size() == 1) {
      result.bytes[d][0] = static_cast<double>(demands[d].bytes);
    }
  }
  for (std::uint32_t d = 0; d < free.size(); ++d) {
    for (std::size_t option = 0; option < free[d]->ports.size(); ++option) {
      result.bytes[free_index[d]][option] =
          static_cast<double>(flow.flow(d, option)) / static_cast<double>(time.rate);
    }
  }
  return result;
}

}  // namespace m2n
