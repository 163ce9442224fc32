// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Simulation: how long a plan takes on a described cluster, message by message.

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/plan.hpp"
#include "core/plan/topology.hpp"

namespace m2n {

/// Bytes from one rank to another in one stage that wait for the same messages. From a rank to
/// itself it is a local copy, which takes no time but where the topology states a memory rate (then
/// a read and a write).
struct SimMessage {
  Rank from = 0;
  Rank to = 0;
  std::uint32_t stage = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> after;  ///< Earlier messages that must have arrived.
};

struct SimulateOptions {
  enum class Discipline : std::uint8_t {
    /// Ready messages move at once, one a pair of ranks in plan order, and share every port fairly
    /// (max-min).
    fair,
    /// As fair, but a port gives each pair of ranks a share by the bytes that the pair has to carry
    /// in all: what senders reach that turn to their peers in proportion. Without relays a plan
    /// then
    /// takes exactly its busiest port's time.
    proportional,
    /// Every port does one message at a time, strictly in plan order, waiting for it if it must.
    in_order,
  };
  Discipline discipline = Discipline::fair;
  /// Not with in_order: messages that a port may have under way, several of a pair among them;
  /// further ones wait, earlier ones in plan order first. So pipelines of chunks stay in step, as
  /// with a bounded number of buffers. 0 is any number, but one a pair.
  std::uint32_t in_flight = 0;
};

/// One message, as it went. Times in seconds from the start of the round.
struct TimelineEvent {
  double start = 0;
  double end = 0;  ///< Arrived: latency included.
  Rank from = 0;
  Rank to = 0;
  std::uint32_t stage = 0;
  std::uint64_t bytes = 0;
};

struct Timeline {
  struct Port {
    std::string name;
    std::uint64_t bytes = 0;
    double busy = 0;  ///< Seconds in which it carried anything.
  };
  double seconds = 0;                 ///< Until the last message has arrived.
  std::vector<TimelineEvent> events;  ///< In plan order: by stage.
  std::vector<Port> ports;            ///< Ports that carried bytes, by number.
};

/// The messages of a plan, by stage, with what each waits for: the bytes that it passes on, and
/// reads of scratch that it overwrites. Cost: the moves of all parameters that start at different
/// stages or follow different patterns.
std::vector<SimMessage> messages_of(const Plan& plan, const Problem& problem);

/// Runs messages that are sorted by stage. Fluid, deterministic, no clock.
/// @throws Error{bad_plan} when messages wait for one another in a circle.
Timeline simulate(const std::vector<SimMessage>& messages, const Topology& topology,
                  const SimulateOptions& options = {});
Timeline simulate(const Plan& plan, const Problem& problem, const Topology& topology,
                  const SimulateOptions& options = {});

}  // namespace m2n
