// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// PyTorch's fully_shard (FSDP2): one DTensor a parameter, possibly over a tensor-parallel one.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/api/values.hpp"
#include "core/layout/layout.hpp"

namespace m2n::sources {

/// Ranks as a row-major mesh (replicas, shards, inner). The inner axis is tensor or expert parallel
/// and cuts first; then FSDP chunks what is left to each inner coordinate.
struct Fsdp2Mesh {
  Index replicas = 1;
  Index shards = 1;
  Index inner = 1;
  std::vector<Rank> ranks;
};

/// What the axes do to one parameter.
struct Fsdp2Cut {
  std::optional<int> inner_dim;  ///< None: replicated over the inner axis.
  int shard_dim = 0;
};

/// Placements ([Replicate,] Shard(d) or StridedShard(d, inner) [, Shard(inner_dim)]); axes of
/// extent 1 are left out, but for the shard axis.
/// @throws Error{bad_argument} naming the parameter: no dimension to cut; a shard_dim above 0 that
///         does not divide; or a cut that the placements cannot say, because the inner axis cuts
///         the same dimension unevenly and the left-to-right reading would misplace elements.
Layout fsdp2_layout(const TensorInfo& tensor, const Fsdp2Mesh& mesh, const Fsdp2Cut& cut);

/// Bytes that @p rank allocates: those of its inner coordinate's first chunk. The rest of the last
/// chunks is padding. 0 for a rank outside the mesh.
std::uint64_t fsdp2_storage_bytes(const TensorInfo& tensor, const Fsdp2Mesh& mesh,
                                  const Fsdp2Cut& cut, Rank rank);

/// All that a layout depends on besides the tensor.
std::string fsdp2_key(const Fsdp2Mesh& mesh, const Fsdp2Cut& cut);

}  // namespace m2n::sources
