// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How a rank reaches its peers: what the ranks tell each other before a session, the path that
/// every pair agrees on, and where the peers' memory is seen from here.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "core/plan/plan.hpp"
#include "transports/nccl/peers.hpp"
#include "transports/nccl/session.hpp"
#include "transports/nccl/session_memory.hpp"
#include "transports/nccl/window.hpp"
#include "transports/nccl/wire.hpp"

namespace m2n::nccl {

/// Peers by rank.
struct Links {
  std::map<std::size_t, Path> to;    ///< Of every peer that this rank sends to ...
  std::map<std::size_t, Path> from;  ///< ... and receives from.
  /// Control blocks of the peers that are mapped, at this process's addresses.
  std::map<std::size_t, std::uint64_t> control_of;
  /// Places of the mapped peers that this rank writes: as SessionMemory numbers them there.
  std::map<std::size_t, std::vector<std::uint64_t>> places_of;
  WireLimits limits;  ///< Equal on every rank.
  bool uses_wire = false;
  bool alone_on_device = false;  ///< No other rank of the group has this rank's device.
  /// What keeps the mappings.
  std::vector<std::shared_ptr<void>> kept;
  std::unique_ptr<Window> window;

  bool uses(Path path) const;
  /// Where this rank writes @p end of a mapped peer.
  std::uint64_t address(const Endpoint& end) const;
};

/// Agrees with all ranks and maps what the paths promise. Collective.
/// @param place  Places this rank's buffers. What it throws becomes the error of every rank.
/// @throws TransportError, the same one on every rank, naming the rank at fault.
Links link_ranks(Connection& connection, const Program& program,
                 const std::function<const SessionMemory&()>& place, Deadline deadline);

}  // namespace m2n::nccl
