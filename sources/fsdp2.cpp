// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/fsdp2.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "sources/sharded_source.hpp"

namespace m2n::sources {

namespace {

/// Where FSDP2 really puts dimension shard_dim: the inner chunk, then its FSDP chunk.
Interval real_part(Index extent, const Fsdp2Mesh& mesh, const Fsdp2Cut& cut, Index shard,
                   Index inner) {
  const bool same = cut.inner_dim && *cut.inner_dim == cut.shard_dim;
  const Interval outer = same ? chunk(extent, mesh.inner, inner) : Interval{0, extent};
  const Interval part = chunk(outer.size(), mesh.shards, shard);
  return {outer.begin + part.begin, outer.begin + part.end};
}

/// The indices of dimension @p d that @p layout gives to @p rank, when they are one interval.
std::optional<Interval> stated_part(const Layout& layout, Rank rank, std::size_t d) {
  std::vector<Interval> parts;
  for (const auto& entry : layout.pieces_of(rank)) {
    parts.push_back(entry.piece.box[d]);
  }
  std::sort(parts.begin(), parts.end());
  Interval whole;
  for (const auto& part : parts) {
    if (whole.empty()) {
      whole = part;
    } else if (part.begin == whole.end) {
      whole.end = part.end;
    } else {
      return std::nullopt;
    }
  }
  return whole;
}

void check_stated(const TensorInfo& tensor, const Fsdp2Mesh& mesh, const Fsdp2Cut& cut,
                  const Layout& layout) {
  const auto d = static_cast<std::size_t>(cut.shard_dim);
  for (Index shard = 0; shard < mesh.shards; ++shard) {
    for (Index inner = 0; inner < mesh.inner; ++inner) {
      const Rank rank = mesh.ranks[static_cast<std::size_t>(shard * mesh.inner + inner)];
      const Interval real = real_part(tensor.shape[d], mesh, cut, shard, inner);
      const auto stated = stated_part(layout, rank, d);
      if (!stated || *stated != (real.empty() ? Interval{} : real)) {
        refuse_tensor(tensor, "dimension " + std::to_string(d) + " is cut into " +
                                  std::to_string(mesh.inner) + " uneven parts and each into " +
                                  std::to_string(mesh.shards) + "; rank " + std::to_string(rank) +
                                  " really holds [" + std::to_string(real.begin) + ", " +
                                  std::to_string(real.end) +
                                  "), which StridedShard placements do not say; the extent must "
                                  "be a multiple of " +
                                  std::to_string(mesh.inner));
      }
    }
  }
}

}  // namespace

Layout fsdp2_layout(const TensorInfo& tensor, const Fsdp2Mesh& mesh, const Fsdp2Cut& cut) {
  const auto d = static_cast<std::size_t>(cut.shard_dim);
  if (tensor.shape.empty()) {
    refuse_tensor(tensor,
                  "a scalar cannot be sharded by FSDP; give it one dimension, or say that the "
                  "trainer does not shard it");
  }
  if (d >= tensor.shape.size() ||
      (cut.inner_dim && *cut.inner_dim >= static_cast<int>(tensor.shape.size()))) {
    refuse_tensor(tensor, "there is no dimension " +
                              std::to_string(std::max(cut.shard_dim, cut.inner_dim.value_or(0))) +
                              " to shard");
  }
  const bool inner = mesh.inner > 1;
  const bool same = inner && cut.inner_dim && *cut.inner_dim == cut.shard_dim;
  if (d > 0) {
    for (Index i = 0; i < (same ? mesh.inner : 1); ++i) {
      const Index extent = same ? chunk(tensor.shape[d], mesh.inner, i).size() : tensor.shape[d];
      if (extent % mesh.shards != 0) {
        refuse_tensor(tensor, "FSDP2 cuts dimension " + std::to_string(d) +
                                  " evenly only, but its " + std::to_string(extent) +
                                  " elements do not divide by " + std::to_string(mesh.shards) +
                                  " shards");
      }
    }
  }
  Dims dims;
  std::vector<Placement> placements;
  if (mesh.replicas > 1) {
    dims.push_back(mesh.replicas);
    placements.push_back(Placement::replicate());
  }
  dims.push_back(mesh.shards);
  placements.push_back(same ? Placement::strided_shard(cut.shard_dim, mesh.inner)
                            : Placement::shard(cut.shard_dim));
  if (inner) {
    dims.push_back(mesh.inner);
    placements.push_back(cut.inner_dim ? Placement::shard(*cut.inner_dim) : Placement::replicate());
  }
  Layout layout = Layout::sharded(tensor.shape, tensor.dtype, Mesh(dims, mesh.ranks), placements);
  if (same && tensor.shape[d] % mesh.inner != 0 && element_count(tensor.shape) > 0) {
    check_stated(tensor, mesh, cut, layout);
  }
  return layout;
}

std::uint64_t fsdp2_storage_bytes(const TensorInfo& tensor, const Fsdp2Mesh& mesh,
                                  const Fsdp2Cut& cut, Rank rank) {
  const auto found = std::find(mesh.ranks.begin(), mesh.ranks.end(), rank);
  if (found == mesh.ranks.end()) {
    return 0;
  }
  const Index inner = static_cast<Index>(found - mesh.ranks.begin()) % mesh.inner;
  Shape local = tensor.shape;
  if (cut.inner_dim) {
    auto& extent = local[static_cast<std::size_t>(*cut.inner_dim)];
    extent = chunk(extent, mesh.inner, inner).size();
  }
  auto& extent = local[static_cast<std::size_t>(cut.shard_dim)];
  extent = ceil_div(extent, mesh.shards);
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(local)),
                           bytes_of(tensor.dtype));
}

std::string fsdp2_key(const Fsdp2Mesh& mesh, const Fsdp2Cut& cut) {
  return " of ranks from " + std::to_string(mesh.ranks.front()) + " as " +
         std::to_string(mesh.replicas) + "x" + std::to_string(mesh.shards) + "x" +
         std::to_string(mesh.inner) + " cut " +
         (cut.inner_dim ? std::to_string(*cut.inner_dim) : "-") + "," +
         std::to_string(cut.shard_dim);
}

}  // namespace m2n::sources
