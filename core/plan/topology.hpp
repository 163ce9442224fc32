// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Topologies: which ranks reach each other over which links, and how fast.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/layout/mesh.hpp"

namespace m2n {

/// A network port between islands. Serves one rank, or is shared by several.
struct Nic {
  std::vector<Rank> ranks;  ///< Sorted.
  double gb_per_s = 0;      ///< 10^9 bytes a second, each direction.
};

/// Islands of ranks that reach one another over links of one rate; NICs join islands.
struct Topology {
  std::vector<std::vector<Rank>> islands;  ///< Each rank is in exactly one. Sorted inside.
  double link_gb_per_s = 0;                ///< A rank and direction, inside an island.
  std::vector<Nic> nics;
  double latency_us = 0;

  /// One island that holds every rank: the default where no topology is given.
  static Topology single_island(Rank world_size, double link_gb_per_s = 380, double latency_us = 3);

  /// Reads a topology file (docs/topology-file.md).
  /// @throws Error{io, bad_argument} naming what is wrong: a rank nowhere or twice, a rate that is
  ///         not positive, a NIC that serves nobody.
  static Topology read(const std::filesystem::path& file);
  static Topology parse(std::string_view json, const std::string& where);
  std::string canonical_json() const;

  /// @throws Error{bad_argument} naming the first rank below @p world_size that is in no island.
  void require(Rank world_size) const;
};

}  // namespace m2n
