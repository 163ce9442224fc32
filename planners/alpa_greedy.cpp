// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The planner "alpa_greedy": the rules of "On Optimizing the Communication of Model Parallelism"
/// (arXiv 2211.05322), tensor by tensor. A task is one box with its holders and receivers; hosts
/// are islands (or, inside a single island, ranks). A task travels as a pipelined broadcast: a
/// chain through one member of every receiving host, and on through the host's others. It occupies
/// its sender and its receivers from begin to end.
///
/// balance=none takes each task's first host as sender, size the host with the least to send, and
/// order also the order of tasks with the shortest schedule found: by exhaustive search for a few
/// tasks, else by rounds of the best of 100 random sets of tasks that share no host.

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "core/api/plugins.hpp"
#include "core/tensor/digest.hpp"
#include "planners/common/emit.hpp"

namespace m2n {
namespace {

constexpr std::size_t kExhaustiveTasks = 7;
constexpr int kTries = 100;

struct Task {
  std::size_t atom = 0;
  std::vector<std::uint32_t> senders;             // hosts, ascending
  std::vector<std::vector<std::uint32_t>> chain;  // [receiving host] holdings
  std::vector<std::uint32_t> receiving;           // hosts, aligned to chain
  std::uint64_t bytes = 0;
  std::uint64_t chunks = 1;  // its duration, too
  std::uint32_t sender = 0;
  std::uint64_t begin = 0;
};

/// When hosts are free to send and to receive.
struct Clock {
  std::map<std::uint32_t, std::uint64_t> out;
  std::map<std::uint32_t, std::uint64_t> in;

  std::uint64_t begin_of(const Task& task) const {
    const auto at = [](const auto& map, std::uint32_t host) {
      const auto found = map.find(host);
      return found == map.end() ? std::uint64_t{0} : found->second;
    };
    std::uint64_t begin = at(out, task.sender);
    for (std::size_t i = 0; i < task.receiving.size(); ++i) {
      begin = std::max(begin, at(in, task.receiving[i]));
      if (i + 1 < task.receiving.size()) {  // it forwards
        begin = std::max(begin, at(out, task.receiving[i]));
      }
    }
    return begin;
  }
  std::uint64_t run(Task& task) {
    task.begin = begin_of(task);
    const std::uint64_t end = task.begin + task.chunks;
    out[task.sender] = end;
    for (std::size_t i = 0; i < task.receiving.size(); ++i) {
      in[task.receiving[i]] = end;
      if (i + 1 < task.receiving.size()) {
        out[task.receiving[i]] = end;
      }
    }
    return end;
  }
};

std::uint64_t makespan(std::vector<Task>& tasks, const std::vector<std::size_t>& order) {
  Clock clock;
  std::uint64_t end = 0;
  for (const std::size_t t : order) {
    end = std::max(end, clock.run(tasks[t]));
  }
  return end;
}

void balance_sizes(std::vector<Task>& tasks) {
  std::map<std::uint32_t, std::uint64_t> load;
  for (Task& task : tasks) {
    task.sender =
        *std::min_element(task.senders.begin(), task.senders.end(),
                          [&](std::uint32_t a, std::uint32_t b) { return load[a] < load[b]; });
    load[task.sender] += task.bytes;
  }
}

std::vector<std::size_t> best_of_all_orders(std::vector<Task>& tasks) {
  std::vector<std::size_t> order(tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<std::size_t> best = order;
  std::uint64_t shortest = makespan(tasks, order);
  while (std::next_permutation(order.begin(), order.end())) {
    const std::uint64_t span = makespan(tasks, order);
    if (span < shortest) {
      shortest = span;
      best = order;
    }
  }
  return best;
}

std::vector<std::size_t> greedy_rounds(std::vector<Task>& tasks) {
  std::vector<std::size_t> left(tasks.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  std::vector<std::size_t> order;
  std::uint64_t state = 0;
  while (!left.empty()) {
    std::vector<std::size_t> best;
    std::uint64_t best_spread = 0;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      std::vector<std::size_t> shuffled = left;
      for (std::size_t i = shuffled.size(); i > 1; --i) {
        state += 0x9e3779b97f4a7c15ULL;
        std::swap(shuffled[i - 1], shuffled[mix64(state) % i]);
      }
      std::map<std::uint32_t, bool> sends;
      std::map<std::uint32_t, bool> receives;
      std::vector<std::size_t> chosen;
      std::uint64_t longest = 0;
      std::uint64_t shortest = ~std::uint64_t{0};
      for (const std::size_t t : shuffled) {
        const Task& task = tasks[t];
        bool free = !sends[task.sender];
        for (std::size_t i = 0; i < task.receiving.size(); ++i) {
          free = free && !receives[task.receiving[i]] &&
                 (i + 1 == task.receiving.size() || !sends[task.receiving[i]]);
        }
        if (!free) {
          continue;
        }
        sends[task.sender] = true;
        for (std::size_t i = 0; i < task.receiving.size(); ++i) {
          receives[task.receiving[i]] = true;
          sends[task.receiving[i]] = sends[task.receiving[i]] || i + 1 < task.receiving.size();
        }
        chosen.push_back(t);
        longest = std::max(longest, task.chunks);
        shortest = std::min(shortest, task.chunks);
      }
      const std::uint64_t spread = longest - shortest;
      if (chosen.size() > best.size() || (chosen.size() == best.size() && spread < best_spread)) {
        best = std::move(chosen);
        best_spread = spread;
      }
    }
    std::sort(best.begin(), best.end());
    for (const std::size_t t : best) {
      order.push_back(t);
      left.erase(std::lower_bound(left.begin(), left.end(), t));
    }
  }
  return order;
}

struct AlpaOptions {
  std::string balance = "order";
  std::uint64_t chunks = 64;
};

class AlpaPlanner final : public Planner {
 public:
  explicit AlpaPlanner(AlpaOptions options) : options_(std::move(options)) {}
  std::string_view name() const noexcept override { return "alpa_greedy"; }

 private:
  void do_plan(const Topology& topology, PlanBuilder& builder) const override {
    const FlowClasses classes(builder.problem());
    topology.require(classes.world_size());
    const Ports ports(topology);
    std::vector<std::uint32_t> number(builder.problem().parameters().size());
    std::vector<std::uint32_t> stages(number.size());
    for (const GeometryFlow& geometry : classes.geometries()) {
      Pattern pattern = make_pattern(geometry, ports);
      std::uint32_t last = 0;
      for (const Move& move : pattern.moves) {
        last = std::max(last, move.stage + 1);
      }
      const std::uint32_t added = builder.add(std::move(pattern));
      for (const std::uint32_t parameter : geometry.group.parameters) {
        number[parameter] = added;
        stages[parameter] = last;
      }
    }
    std::uint32_t first = 0;  // one tensor after the other
    for (std::uint32_t parameter = 0; parameter < number.size(); ++parameter) {
      builder.assign(parameter, number[parameter], first);
      first += stages[parameter];
    }
  }

  Pattern make_pattern(const GeometryFlow& geometry, const Ports& ports) const {
    const std::span<const RankPiece> sources = geometry.group.geometry.source->pieces();
    const std::uint32_t first_destination = geometry.group.geometry.source_count();
    const std::span<const RankPiece> targets = geometry.group.geometry.destination->pieces();
    const auto host = [&](Rank rank) {
      return ports.islands() > 1 ? ports.island_of(rank) : static_cast<std::uint32_t>(rank);
    };
    PatternMaker maker(geometry);
    std::vector<Task> tasks;
    std::uint64_t largest = 1;
    for (std::size_t a = 0; a < geometry.atoms.size(); ++a) {
      const Atom atom = geometry.atoms[a];
      Task task;
      task.atom = a;
      task.bytes = maker.begin_atom(atom);
      std::map<std::uint32_t, std::vector<std::uint32_t>> by_host;
      for (const std::uint32_t holding : maker.remote_receivers()) {
        by_host[host(targets[holding - first_destination].rank)].push_back(holding);
      }
      for (const std::uint32_t holder : atom.holders) {
        task.senders.push_back(host(sources[holder].rank));
      }
      std::sort(task.senders.begin(), task.senders.end());
      task.senders.erase(std::unique(task.senders.begin(), task.senders.end()), task.senders.end());
      task.sender = task.senders.front();
      for (auto& [receiving, holdings] : by_host) {
        task.receiving.push_back(receiving);
        task.chain.push_back(std::move(holdings));
      }
      largest = std::max(largest, task.bytes);
      tasks.push_back(std::move(task));
    }
    for (Task& task : tasks) {
      task.chunks =
          std::max<std::uint64_t>(1, (task.bytes * options_.chunks + largest - 1) / largest);
    }
    if (options_.balance != "none") {
      balance_sizes(tasks);
    }
    std::vector<std::size_t> order(tasks.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (options_.balance == "order") {
      order = tasks.size() <= kExhaustiveTasks ? best_of_all_orders(tasks) : greedy_rounds(tasks);
    }
    (void)makespan(tasks, order);
    std::map<std::uint32_t, std::size_t> turn;  // by host, over its members that hold a task
    for (const std::size_t t : order) {
      const Task& task = tasks[t];
      const Atom atom = geometry.atoms[task.atom];
      (void)maker.begin_atom(atom);
      std::vector<std::uint32_t> members;
      for (const std::uint32_t holder : atom.holders) {
        if (host(sources[holder].rank) == task.sender) {
          members.push_back(holder);
        }
      }
      const std::uint32_t sender = members[turn[task.sender]++ % members.size()];
      std::uint32_t last = 0;
      for (std::uint64_t c = 0; c < task.chunks; ++c) {
        const std::uint32_t box =
            maker.box(task.bytes * c / task.chunks, task.bytes * (c + 1) / task.chunks);
        if (box == PatternMaker::kNoBox) {
          continue;
        }
        auto stage = static_cast<std::uint32_t>(task.begin + c);
        std::uint32_t from = sender;
        for (const auto& holdings : task.chain) {
          std::uint32_t at = from;
          for (std::uint32_t hop = 0; hop < holdings.size(); ++hop) {
            maker.move(box, at, holdings[hop], stage + hop);
            last = std::max(last, stage + hop);
            at = holdings[hop];
          }
          from = holdings.front();
          ++stage;
        }
      }
      maker.add_local_moves(0, last + 1);
    }
    return std::move(maker).take();
  }

  AlpaOptions options_;
};

}  // namespace

void add_planner_alpa_greedy(Registries& registries) {
  registries.planners.add(
      "alpa_greedy",
      "AlpaComm's rules: broadcasts between hosts; balance=order|size|none, chunks=N",
      [](const PlannerContext& context) {
        constexpr std::string_view kWho = "planner 'alpa_greedy'";
        require_known_options(kWho, context.options, {"balance", "chunks"});
        AlpaOptions options;
        options.balance =
            choice_option(kWho, context.options, "balance", {"order", "size", "none"});
        options.chunks = positive_option(kWho, context.options, "chunks", options.chunks);
        return std::make_unique<AlpaPlanner>(std::move(options));
      });
}

}  // namespace m2n
