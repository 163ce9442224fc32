// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/relabel.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "core/error.hpp"
#include "core/plan/flow_classes.hpp"

namespace m2n {
namespace {

/// Columns for rows at the least sum of costs: shortest augmenting paths (Jonker and Volgenant).
std::vector<std::size_t> assign(const std::vector<std::vector<double>>& cost) {
  const std::size_t n = cost.size();
  constexpr double kFar = std::numeric_limits<double>::infinity();
  std::vector<double> row_price(n + 1, 0);
  std::vector<double> column_price(n + 1, 0);
  std::vector<std::size_t> row_of(n + 1, 0);  // 1-based; 0 is none
  std::vector<std::size_t> way(n + 1, 0);
  for (std::size_t row = 1; row <= n; ++row) {
    row_of[0] = row;
    std::size_t column = 0;
    std::vector<double> least(n + 1, kFar);
    std::vector<bool> done(n + 1, false);
    do {
      done[column] = true;
      const std::size_t at = row_of[column];
      double step = kFar;
      std::size_t next = 0;
      for (std::size_t c = 1; c <= n; ++c) {
        if (done[c]) {
          continue;
        }
        const double reduced = cost[at - 1][c - 1] - row_price[at] - column_price[c];
        if (reduced < least[c]) {
          least[c] = reduced;
          way[c] = column;
        }
        if (least[c] < step) {
          step = least[c];
          next = c;
        }
      }
      for (std::size_t c = 0; c <= n; ++c) {
        if (done[c]) {
          row_price[row_of[c]] += step;
          column_price[c] -= step;
        } else {
          least[c] -= step;
        }
      }
      column = next;
    } while (row_of[column] != 0);
    while (column != 0) {
      row_of[column] = row_of[way[column]];
      column = way[column];
    }
  }
  std::vector<std::size_t> columns(n);
  for (std::size_t c = 1; c <= n; ++c) {
    columns[row_of[c] - 1] = c - 1;
  }
  return columns;
}

}  // namespace

Relabelling relabel(const Problem& problem, const Topology& topology) {
  topology.require(problem.world_size());
  const std::vector<Rank>& workers = problem.destination_ranks();
  const std::size_t n = workers.size();
  const Ports ports(topology);
  std::map<Rank, std::size_t> position;
  for (std::size_t w = 0; w < n; ++w) {
    position.emplace(workers[w], w);
  }
  // [part][player]: bytes of the part that the player holds, and that its island holds.
  std::vector<std::vector<double>> held(n, std::vector<double>(n, 0));
  std::vector<std::vector<double>> near(n, std::vector<double>(n, 0));
  std::vector<double> needed(n, 0);
  for (const GeometryGroup& group : group_by_geometry(problem)) {
    const Atoms atoms = make_atoms(problem, group);
    const Geometry& geometry = group.geometry;
    const auto scale =
        static_cast<double>(bytes_of(geometry.destination->dtype()) * group.parameters.size());
    // Atoms with one set of holders add up to one weight a part.
    std::map<const std::uint32_t*, std::pair<std::size_t, std::map<std::size_t, double>>> by_set;
    for (std::size_t a = 0; a < atoms.size(); ++a) {
      auto& [example, parts] = by_set[atoms[a].holders.data()];
      example = a;
      Rank last = -1;
      for (const std::uint32_t holding : atoms[a].receivers) {
        const Rank rank = geometry.destination->pieces()[holding - geometry.source_count()].rank;
        if (rank != last) {
          parts[position.at(rank)] += static_cast<double>(atoms[a].box.volume()) * scale;
        }
        last = rank;
      }
    }
    for (const auto& [set, entry] : by_set) {
      std::set<Rank> holders;
      std::set<std::uint32_t> islands;
      for (const std::uint32_t holding : atoms[entry.first].holders) {
        holders.insert(geometry.source->pieces()[holding].rank);
        islands.insert(ports.island_of(geometry.source->pieces()[holding].rank));
      }
      for (const auto& [part, bytes] : entry.second) {
        needed[part] += bytes;
        for (std::size_t player = 0; player < n; ++player) {
          held[part][player] += holders.contains(workers[player]) ? bytes : 0;
          near[part][player] += islands.contains(ports.island_of(workers[player])) ? bytes : 0;
        }
      }
    }
  }
  double total = 1;
  for (const double bytes : needed) {
    total += bytes;
  }
  // Bytes between islands first; bytes between ranks, and then staying put, break ties.
  std::vector<std::vector<double>> cost(n, std::vector<double>(n, 0));
  for (std::size_t part = 0; part < n; ++part) {
    for (std::size_t player = 0; player < n; ++player) {
      cost[part][player] = (needed[part] - near[part][player]) +
                           (needed[part] - held[part][player]) / (2.0 * static_cast<double>(n)) +
                           (part == player ? 0 : 1e-9 * total / static_cast<double>(n * n));
    }
  }
  std::vector<std::size_t> chosen = assign(cost);
  const auto count = [&](const auto& player_of) {
    RelabelBytes bytes;
    double local = 0;
    double island = 0;
    double far = 0;
    for (std::size_t part = 0; part < n; ++part) {
      const std::size_t player = player_of(part);
      local += held[part][player];
      island += near[part][player] - held[part][player];
      far += needed[part] - near[part][player];
    }
    bytes.local = static_cast<std::uint64_t>(local);
    bytes.island = static_cast<std::uint64_t>(island);
    bytes.far = static_cast<std::uint64_t>(far);
    return bytes;
  };
  Relabelling result;
  result.before = count([](std::size_t part) { return part; });
  result.after = count([&](std::size_t part) { return chosen[part]; });
  const auto worse = [](const RelabelBytes& a, const RelabelBytes& b) {
    return std::pair(a.far, a.island) >= std::pair(b.far, b.island);
  };
  if (worse(result.after, result.before)) {
    for (std::size_t part = 0; part < n; ++part) {
      chosen[part] = part;
    }
    result.after = result.before;
  }
  for (std::size_t part = 0; part < n; ++part) {
    result.ranks.push_back(workers[chosen[part]]);
  }
  return result;
}

Problem relabelled(const Problem& problem, const Relabelling& relabelling) {
  const std::vector<Rank>& workers = problem.destination_ranks();
  expects(relabelling.ranks.size() == workers.size(), "a rank for each destination rank");
  std::map<Rank, Rank> player;
  for (std::size_t w = 0; w < workers.size(); ++w) {
    player.emplace(workers[w], relabelling.ranks[w]);
  }
  std::map<const Layout*, std::shared_ptr<const Layout>> made;
  std::vector<Parameter> parameters = problem.parameters();
  for (Parameter& parameter : parameters) {
    std::shared_ptr<const Layout>& layout = made[parameter.destination.layout.get()];
    if (!layout) {
      const Layout& old = *parameter.destination.layout;
      std::vector<Rank> ranks;
      for (const Rank rank : old.ranks()) {
        ranks.push_back(player.at(rank));
      }
      std::vector<RankPiece> pieces(old.pieces().begin(), old.pieces().end());
      for (RankPiece& piece : pieces) {
        piece.rank = player.at(piece.rank);
      }
      layout = std::make_shared<Layout>(
          Layout::explicit_pieces(old.shape(), old.dtype(), std::move(ranks), std::move(pieces)));
    }
    parameter.destination.layout = layout;
  }
  return Problem::make(std::move(parameters));
}

}  // namespace m2n
