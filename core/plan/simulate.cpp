// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/simulate.hpp"

#include <algorithm>
#include <limits>
#include <queue>
#include <set>
#include <unordered_map>

#include "core/error.hpp"

namespace m2n {
namespace {

class Simulator {
 public:
  Simulator(const std::vector<SimMessage>& messages, const Topology& topology,
            const SimulateOptions& options)
      : messages_(messages),
        ports_(topology),
        options_(options),
        latency_(topology.latency_us * 1e-6),
        memory_rate_(topology.memory_gb_per_s * 1e9),
        state_(messages.size()),
        port_state_(ports_.size()) {
    std::unordered_map<std::uint64_t, std::uint32_t> pair_of;
    for (std::uint32_t m = 0; m < messages.size(); ++m) {
      const SimMessage& message = messages[m];
      State& state = state_[m];
      state.left = static_cast<double>(message.bytes);
      state.waits = static_cast<std::uint32_t>(message.after.size());
      for (const std::uint32_t before : message.after) {
        state_[before].dependents.push_back(m);
      }
      if (message.from == message.to) {
        state.pair = kLocal;
        continue;
      }
      const std::uint64_t key =
          static_cast<std::uint64_t>(message.from) << 32 | static_cast<std::uint32_t>(message.to);
      const auto [at, added] = pair_of.emplace(key, static_cast<std::uint32_t>(pairs_.size()));
      state.pair = at->second;
      if (added) {
        pairs_.emplace_back();
        ports_.path(message.from, message.to, pairs_.back().path);
        for (const std::uint32_t port : pairs_.back().path) {
          port_state_[port].pairs.push_back(state.pair);
        }
      }
      pairs_[state.pair].weight += static_cast<double>(message.bytes);
      for (const std::uint32_t port : pairs_[state.pair].path) {
        port_state_[port].bytes += message.bytes;
        if (options_.discipline == SimulateOptions::Discipline::in_order) {
          port_state_[port].order.push_back(m);
        }
      }
    }
    for (Pair& pair : pairs_) {
      if (options_.discipline != SimulateOptions::Discipline::proportional || pair.weight == 0) {
        pair.weight = 1;
      }
    }
  }

  Timeline run() {
    timeline_.events.resize(messages_.size());
    for (std::uint32_t m = 0; m < messages_.size(); ++m) {
      if (state_[m].waits == 0) {
        make_ready(m);
      }
    }
    start_what_can();
    while (!active_.empty() || !arrivals_.empty()) {
      if (rates_stale_) {
        share_ports();
      }
      double next = kNever;
      if (!arrivals_.empty()) {
        next = arrivals_.top().first;
      }
      for (const std::uint32_t m : active_) {
        next = std::min(next, now_ + state_[m].left / state_[m].rate);
      }
      advance(next);
      start_what_can();
    }
    if (arrived_ != messages_.size()) {
      throw Error(Errc::bad_plan,
                  "the plan cannot be simulated: " + std::to_string(messages_.size() - arrived_) +
                      " messages wait for one another; stages must grow along relays");
    }
    for (std::uint32_t port = 0; port < ports_.size(); ++port) {
      if (port_state_[port].bytes > 0) {
        timeline_.ports.push_back(
            {ports_.name(port), port_state_[port].bytes, port_state_[port].busy});
      }
    }
    return std::move(timeline_);
  }

 private:
  static constexpr std::uint32_t kLocal = 0xffffffffU;
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kLeastRate = 1e-3;  // bytes a second: a rate of 0 would never end
  static constexpr double kTogether =
      1e-12;  // relative: ends that differ by rounding are one event

  struct State {
    double left = 0;
    double rate = 0;
    std::uint32_t waits = 0;
    std::uint32_t pair = 0;
    std::vector<std::uint32_t> dependents;
  };
  using EarliestFirst =
      std::priority_queue<std::uint32_t, std::vector<std::uint32_t>, std::greater<>>;
  struct Pair {
    std::vector<std::uint32_t> path;
    EarliestFirst ready;
    double weight = 0;  // by which ports share
    std::uint32_t under_way = 0;
    bool listed = false;  // in candidates_
  };
  struct PortState {
    std::uint64_t bytes = 0;
    double busy = 0;
    std::vector<std::uint32_t> pairs;
    std::vector<std::uint32_t> active;
    std::vector<std::uint32_t> order;  // in_order: messages still to come are [next, end)
    std::size_t next = 0;
    // While ports are shared: the rate, number and weight of messages that have no rate yet.
    double left = 0;
    double weight = 0;
    std::uint32_t open = 0;
  };

  void make_ready(std::uint32_t m) {
    State& state = state_[m];
    timeline_.events[m] = {
        now_, 0, messages_[m].from, messages_[m].to, messages_[m].stage, messages_[m].bytes};
    if (state.pair == kLocal) {
      const double seconds = memory_rate_ > 0 ? 2 * state.left / memory_rate_ : 0;
      arrivals_.emplace(now_ + seconds, m);
      return;
    }
    pairs_[state.pair].ready.push(m);
    list(state.pair);
  }

  /// Asks for a look at the pair's earliest ready message.
  void list(std::uint32_t pair) {
    if (!pairs_[pair].listed && !pairs_[pair].ready.empty()) {
      pairs_[pair].listed = true;
      candidates_.emplace(pairs_[pair].ready.top(), pair);
    }
  }

  bool may_start(std::uint32_t m, const Pair& pair) const {
    if (options_.in_flight == 0 && pair.under_way > 0) {
      return false;
    }
    for (const std::uint32_t port : pair.path) {
      const PortState& state = port_state_[port];
      if (options_.discipline == SimulateOptions::Discipline::in_order) {
        if (state.order[state.next] != m) {
          return false;
        }
      } else if (options_.in_flight > 0 && state.active.size() >= options_.in_flight) {
        return false;
      }
    }
    return true;
  }

  void start_what_can() {
    while (!candidates_.empty()) {  // in plan order
      const auto [m, p] = candidates_.top();
      candidates_.pop();
      Pair& pair = pairs_[p];
      pair.listed = false;
      if (m != pair.ready.top()) {  // an earlier one became ready meanwhile
        list(p);
        continue;
      }
      if (!may_start(m, pair)) {
        continue;  // listed again when one of its ports is done with something
      }
      pair.ready.pop();
      ++pair.under_way;
      timeline_.events[m].start = now_;
      active_.push_back(m);
      for (const std::uint32_t port : pair.path) {
        port_state_[port].active.push_back(m);
      }
      rates_stale_ = true;
      list(p);
    }
  }

  /// Max-min fair rates: again and again the port that gives its messages least.
  void share_ports() {
    rates_stale_ = false;
    sharing_.clear();
    for (const std::uint32_t m : active_) {
      state_[m].rate = 0;
      for (const std::uint32_t port : pairs_[state_[m].pair].path) {
        PortState& state = port_state_[port];
        if (state.open == 0) {
          sharing_.push_back(port);
          state.left = ports_.rate(port);
          state.weight = 0;
        }
        ++state.open;
        state.weight += pairs_[state_[m].pair].weight;
      }
    }
    std::sort(sharing_.begin(), sharing_.end());
    for (;;) {
      std::uint32_t tightest = kLocal;
      double share = kNever;
      std::size_t kept = 0;
      for (const std::uint32_t port : sharing_) {
        const PortState& state = port_state_[port];
        if (state.open == 0) {
          continue;
        }
        sharing_[kept++] = port;
        const double here = state.left / state.weight;
        if (here < share) {
          share = here;
          tightest = port;
        }
      }
      sharing_.resize(kept);
      if (tightest == kLocal) {
        return;
      }
      for (const std::uint32_t m : port_state_[tightest].active) {
        if (state_[m].rate > 0) {
          continue;
        }
        const Pair& pair = pairs_[state_[m].pair];
        state_[m].rate = std::max(share * pair.weight, kLeastRate);
        for (const std::uint32_t port : pair.path) {
          PortState& at = port_state_[port];
          at.left = std::max(0.0, at.left - state_[m].rate);
          --at.open;
          // What is left by rounding must not make the port look wide, nor shut.
          at.weight = std::max(at.weight - pair.weight, 1e-12 * pair.weight);
        }
      }
    }
  }

  /// Moves the clock to @p next, ends what ends there and makes ready what waited for it.
  void advance(double next) {
    const double span = next - now_;
    touched_.clear();
    for (const std::uint32_t m : active_) {
      for (const std::uint32_t port : pairs_[state_[m].pair].path) {
        if (port_state_[port].open == 0) {
          port_state_[port].open = 1;  // marks it as counted
          touched_.push_back(port);
        }
      }
    }
    for (const std::uint32_t port : touched_) {
      port_state_[port].busy += span;
      port_state_[port].open = 0;
    }
    // Ends are compared as times: bytes left over by rounding may be too few to move the clock.
    const double ended = next * (1 + kTogether);
    std::size_t kept = 0;
    for (const std::uint32_t m : active_) {
      State& state = state_[m];
      if (now_ + state.left / state.rate > ended) {
        state.left -= state.rate * span;
        active_[kept++] = m;
        continue;
      }
      Pair& pair = pairs_[state.pair];
      --pair.under_way;
      arrivals_.emplace(next + latency_, m);
      for (const std::uint32_t port : pair.path) {
        PortState& at = port_state_[port];
        at.active.erase(std::find(at.active.begin(), at.active.end(), m));
        ++at.next;
      }
      list(state.pair);
      if (options_.discipline == SimulateOptions::Discipline::in_order) {
        for (const std::uint32_t port : pair.path) {
          const PortState& at = port_state_[port];
          if (at.next < at.order.size()) {
            list(state_[at.order[at.next]].pair);
          }
        }
      } else if (options_.in_flight > 0) {
        for (const std::uint32_t port : pair.path) {
          for (const std::uint32_t other : port_state_[port].pairs) {
            list(other);
          }
        }
      }
      rates_stale_ = true;
    }
    active_.resize(kept);
    now_ = next;
    while (!arrivals_.empty() && arrivals_.top().first <= now_) {
      const std::uint32_t m = arrivals_.top().second;
      arrivals_.pop();
      ++arrived_;
      timeline_.events[m].end = now_;
      timeline_.seconds = std::max(timeline_.seconds, now_);
      for (const std::uint32_t dependent : state_[m].dependents) {
        if (--state_[dependent].waits == 0) {
          make_ready(dependent);
        }
      }
    }
  }

  const std::vector<SimMessage>& messages_;
  Ports ports_;
  SimulateOptions options_;
  double latency_;
  double memory_rate_;
  std::vector<State> state_;
  std::vector<PortState> port_state_;
  std::vector<Pair> pairs_;
  double now_ = 0;
  std::size_t arrived_ = 0;
  std::vector<std::uint32_t> active_;
  bool rates_stale_ = true;
  using Candidate = std::pair<std::uint32_t, std::uint32_t>;  // message, pair
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
  std::vector<std::uint32_t> sharing_;
  std::vector<std::uint32_t> touched_;
  using Arrival = std::pair<double, std::uint32_t>;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  Timeline timeline_;
};

}  // namespace

Timeline simulate(const std::vector<SimMessage>& messages, const Topology& topology,
                  const SimulateOptions& options) {
  Rank world = 0;
  for (std::size_t m = 0; m < messages.size(); ++m) {
    expects(m == 0 || messages[m - 1].stage <= messages[m].stage, "messages sorted by stage");
    expects(messages[m].from >= 0 && messages[m].to >= 0, "ranks from 0");
    world = std::max({world, messages[m].from + 1, messages[m].to + 1});
  }
  topology.require(world);
  return Simulator(messages, topology, options).run();
}

Timeline simulate(const Plan& plan, const Problem& problem, const Topology& topology,
                  const SimulateOptions& options) {
  topology.require(problem.world_size());
  return simulate(messages_of(plan, problem), topology, options);
}

}  // namespace m2n
