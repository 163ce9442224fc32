// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Exact min-max assignment of bytes to ports, by flow.

#include <cstdint>
#include <span>
#include <vector>

namespace m2n {

/// Bytes that any of some ports may carry, in any split. A port may stand twice.
struct FlowDemand {
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> ports;
};

/// The least time in which ports of given rates carry all demands, and how.
struct MinMaxFlow {
  double seconds = 0;
  /// A binding (Hall) set: bytes that only these ports may carry, over their rates, are seconds.
  /// Sorted; empty when nothing moves.
  std::vector<std::uint32_t> binding_ports;
  double binding_bytes = 0;
  /// Bytes [demand][as in its ports] of one optimum. Sums to the demand's bytes.
  std::vector<std::vector<double>> bytes;
};

/// Solves it exactly: discrete Newton steps on the time, each a maximum flow in integers (rates are
/// rounded to 1,000 bytes a second). Demands are split evenly over their ports as far as an optimum
/// allows. Deterministic. Cost: a few maximum flows over the demands with a choice.
/// @pre every demand with bytes has a port, and every rate is above 0.
MinMaxFlow min_max_flow(std::span<const FlowDemand> demands, std::span<const double> rates);

}  // namespace m2n
