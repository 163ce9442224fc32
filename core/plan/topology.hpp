// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Topologies: which ranks reach each other over which links, and how fast.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/layout/mesh.hpp"

namespace m2n {

/// A network port between islands. Serves one rank, or is shared by several.
struct Nic {
  std::vector<Rank> ranks;      ///< Sorted.
  double gb_per_s = 0;          ///< 10^9 bytes a second, each direction, as achieved in practice.
  double nominal_gb_per_s = 0;  ///< Never exceeded; equals gb_per_s where a file does not say.
};

/// A shared uplink of a set of ranks (a leaf switch, a rack): bytes between islands that cross the
/// edge of the set pass it.
struct Uplink {
  std::string name;
  std::vector<Rank> ranks;  ///< Sorted.
  double gb_per_s = 0;      ///< Each direction. Taken as nominal too.
};

/// Islands of ranks that reach one another over links of one rate; NICs join islands.
struct Topology {
  std::vector<std::vector<Rank>> islands;  ///< Each rank is in exactly one. Sorted inside.
  double link_gb_per_s = 0;                ///< A rank and direction, inside an island.
  double link_nominal_gb_per_s = 0;        ///< Never exceeded; equals link_gb_per_s by default.
  std::vector<Nic> nics;                   ///< A rank has at most one.
  std::vector<Uplink> uplinks;
  double latency_us = 0;
  double memory_gb_per_s = 0;  ///< Of one rank, reads and writes together; 0 where unknown.

  /// One island that holds every rank: the default where no topology is given.
  static Topology single_island(Rank world_size, double link_gb_per_s = 380, double latency_us = 3);

  /// Reads a topology file (docs/topology-file.md).
  /// @throws Error{io, bad_argument} naming what is wrong: a rank nowhere or twice, a rate that is
  ///         not positive, a NIC that serves nobody, several islands and a rank without a NIC.
  static Topology read(const std::filesystem::path& file);
  static Topology parse(std::string_view json, const std::string& where);
  /// Keys sorted, no blanks; parse() gives an equal topology back.
  std::string canonical_json() const;

  /// @throws Error{bad_argument} naming the first rank below @p world_size that is in no island.
  void require(Rank world_size) const;

  /// One more than the largest rank of any island.
  Rank rank_count() const;
};

/// The transmit and receive ports of a topology, numbered, and the way between two ranks.
/// Each physical port is two here: one a direction.
class Ports {
 public:
  enum class Kind : std::uint8_t { link, nic, uplink };

  explicit Ports(const Topology& topology);

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(rate_.size()); }
  /// Bytes a second.
  double rate(std::uint32_t port) const { return rate_[port]; }
  double nominal_rate(std::uint32_t port) const { return nominal_[port]; }
  Kind kind(std::uint32_t port) const { return kind_[port]; }
  bool outgoing(std::uint32_t port) const { return port % 2 == 0; }
  /// "rank 37 egress", "NIC of ranks 0-3 ingress", "uplink 'rack 1' egress".
  std::string name(std::uint32_t port) const;

  std::uint32_t island_of(Rank rank) const { return island_of_[static_cast<std::size_t>(rank)]; }
  std::uint32_t islands() const noexcept { return islands_; }
  static std::uint32_t link_out(Rank rank) { return 2 * static_cast<std::uint32_t>(rank); }
  static std::uint32_t link_in(Rank rank) { return 2 * static_cast<std::uint32_t>(rank) + 1; }
  /// kNone for a rank without NIC.
  std::uint32_t nic_out(Rank rank) const { return nic_of_[static_cast<std::size_t>(rank)]; }
  std::uint32_t nic_in(Rank rank) const {
    const std::uint32_t out = nic_out(rank);
    return out == kNone ? kNone : out + 1;
  }
  static constexpr std::uint32_t kNone = 0xffffffffU;

  /// Appends the ports that bytes from @p from to @p to pass: nothing for a rank and itself.
  void path(Rank from, Rank to, std::vector<std::uint32_t>& out) const;

 private:
  std::vector<double> rate_;
  std::vector<double> nominal_;
  std::vector<Kind> kind_;
  std::vector<std::string> shared_names_;  // of ports past the links, one a pair
  std::vector<std::uint32_t> island_of_;
  std::vector<std::uint32_t> nic_of_;
  std::vector<std::vector<bool>> uplink_members_;
  std::uint32_t first_uplink_ = 0;
  std::uint32_t islands_ = 0;
};

}  // namespace m2n
