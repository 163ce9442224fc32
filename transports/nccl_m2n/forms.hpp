// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What NVIDIA's reshard library can be told of a parameter: a contiguous interval of ranks a side,
/// a mesh of one or two axes over it, and at most one axis that shards, evenly. No CUDA here.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/plan/problem.hpp"

namespace m2n::nccl_m2n {

/// A placement of the library: a tensor dimension, or this.
constexpr int kReplicate = -1;
/// Tensors that one group call takes.
constexpr std::size_t kGroupTensors = 4096;

/// One side of a parameter in the library's words. Ranks are [start, start + shards * replicas).
struct SideForm {
  Rank start = 0;
  std::vector<int> dims;                 ///< Of the mesh.
  std::vector<int> placements;           ///< One a mesh axis.
  std::vector<std::size_t> local_shape;  ///< In elements.
  int shard_dim = 0;                     ///< Meaningful when shards > 1.
  int shards = 1;
  int replicas = 1;
  bool shard_axis_first = false;  ///< Of two axes; otherwise shards are neighbours.

  Rank count() const { return shards * replicas; }
  bool holds(Rank rank) const { return rank >= start && rank < start + count(); }
  int shard_of(Rank rank) const;
  Rank rank_of(int shard, int replica) const;

  friend bool operator==(const SideForm&, const SideForm&) = default;
};

/// A parameter in the library's words.
struct Form {
  std::uint32_t parameter = 0;
  SideForm source;
  SideForm destination;
  DType dtype = DType::u8;
  std::vector<std::size_t> shape;  ///< Global; a scalar counts as [1].

  /// Equal for parameters that the library treats alike, whatever their sizes.
  std::string pattern() const;
  /// A small tensor of the same pattern, of @p dtype u8.
  Form miniature() const;
};

/// Fixed sizes of the library.
struct Caps {
  int sources = 32;  ///< Source shards that one destination shard meets ...
  int targets = 64;  ///< ... and ranks that one source rank sends to.
  std::uint64_t staging_bytes = std::uint64_t{2} << 30;  ///< Largest local tensor that is staged.

  friend bool operator==(const Caps&, const Caps&) = default;
};

/// @throws Error{unavailable} naming the parameter and why the library cannot move it.
Form express(const Problem& problem, std::uint32_t parameter, const Caps& caps);

/// Where rank @p rank of a side holds its part: the buffer of that side, and where in it.
struct LocalPlace {
  std::uint32_t buffer = 0;
  std::uint64_t offset_bytes = 0;
};
/// @pre express() accepted the parameter, and @p rank holds a part of it on that side.
LocalPlace local_place(const Problem& problem, std::uint32_t parameter, Role role, Rank rank);

/// Bytes that @p form moves from rank to rank by the library's UNIFORM rule, added to @p traffic.
void add_traffic(const Form& form, std::map<std::pair<Rank, Rank>, std::uint64_t>& traffic);

}  // namespace m2n::nccl_m2n
