// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Certificates: how long a plan takes, how long any plan must take, and what binds.

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/flow_classes.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/topology.hpp"

namespace m2n {

/// A lower bound on the time of every plan of a kind. "Practical" uses the rates that a cluster
/// achieves, "hard" the nominal ones, which nothing exceeds.
struct Bound {
  std::string name;   ///< "B1 rank ingress"
  std::string binds;  ///< The ports or ranks that it is about, in words.
  double seconds = 0;
  double hard_seconds = 0;
};

/// What no plan can beat, by rule. Rules that a topology does not touch are left out.
struct Bounds {
  std::vector<Bound> any;     ///< B1 to B8: for every plan, relays and striping included.
  std::vector<Bound> direct;  ///< For plans that send every byte straight from a source holder.
  const Bound& best() const;  ///< The largest practical one of any.
  double seconds() const;     ///< Of best().
  double hard_seconds() const;
  const Bound& best_direct() const;  ///< The largest of any and direct.
  double direct_seconds() const;
  double direct_hard_seconds() const;
};
/// Exact by flow for the Hall sets B2, B4 and B6d. Cost: linear in classes, plus the flows.
Bounds bounds_of(const FlowClasses& classes, const Topology& topology);

/// What a plan puts on one port.
struct PortLoad {
  std::string name;
  std::uint64_t bytes = 0;
  double seconds = 0;  ///< At the practical rate.
};

/// The figures of one plan on one topology, and the bounds beside them.
struct Certificate {
  PlanSummary summary;
  Bounds bounds;
  std::vector<PortLoad> ports;  ///< Ports that carry bytes, slowest first.
  std::uint32_t hops = 0;       ///< Of the longest chain of moves between ranks.
  /// Largest port time plus one latency a hop: exact for a plan without relays, and for chains in
  /// the limit of many chunks.
  double seconds = 0;
  double ratio = 1;         ///< seconds over bounds.seconds(); 1 when nothing moves.
  double direct_ratio = 1;  ///< seconds over bounds.direct_seconds().
  std::string binds;        ///< The slowest port of the plan.
};

/// Cost: the distinct moves of the plan, and bounds_of().
Certificate certify(const Plan& plan, const Problem& problem, const Topology& topology);
Certificate certify(const Plan& plan, const Problem& problem, const Topology& topology,
                    const FlowClasses& classes);

/// A block of lines for people.
std::string to_text(const Certificate& certificate);
/// One object, keys with units.
std::string to_json(const Certificate& certificate);

}  // namespace m2n
