// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump_tensors.hpp"

#include <utility>

#include "core/error.hpp"

namespace m2n {

DumpTensors::DumpTensors(const std::filesystem::path& file, Role side, bool verify)
    : dump_(file), side_(side), verify_(verify) {
  std::vector<DumpShard> all = dump_.shards(side);
  // A tensor that this side had no use for has shards without elements: there are no values of it.
  std::unordered_set<std::string> held;
  for (const DumpShard& shard : all) {
    if (!shard.compact.pieces.empty() || element_count(shard.shape) == 0) {
      held.insert(shard.name);
    }
  }
  for (DumpShard& shard : all) {
    if (!held.contains(shard.name)) {
      continue;
    }
    const auto [entry, is_new] = by_name_.try_emplace(shard.name, catalogue_.size());
    if (is_new) {
      catalogue_.push_back({shard.name, shard.dtype, shard.shape});
      shards_.emplace_back();
    }
    const TensorInfo& tensor = catalogue_[entry->second];
    if (tensor.dtype != shard.dtype || tensor.shape != shard.shape) {
      throw Error(Errc::io, "the shards of '" + shard.name + "' in '" + dump_.file().string() +
                                "' disagree about its dtype or its shape");
    }
    shards_[entry->second].push_back(std::move(shard));
  }
  in_declared_order();
}

std::size_t DumpTensors::index_of(std::string_view tensor) const {
  const auto found = by_name_.find(std::string(tensor));
  if (found == by_name_.end()) {
    throw Error(Errc::bad_argument, "'" + dump_.file().string() + "' has no shard of a tensor '" +
                                        std::string(tensor) + "'");
  }
  return found->second;
}

void DumpTensors::in_declared_order() {
  std::vector<std::size_t> order;
  std::unordered_set<std::size_t> placed;
  for (const std::string& name : dump_.parameters()) {
    const auto found = by_name_.find(name);
    if (found != by_name_.end() && placed.insert(found->second).second) {
      order.push_back(found->second);
    }
  }
  for (std::size_t i = 0; i < catalogue_.size(); ++i) {
    if (!placed.contains(i)) {
      order.push_back(i);
    }
  }
  Catalogue catalogue;
  std::vector<std::vector<DumpShard>> shards;
  for (const std::size_t i : order) {
    by_name_[catalogue_[i].name] = catalogue.size();
    catalogue.push_back(std::move(catalogue_[i]));
    shards.push_back(std::move(shards_[i]));
  }
  catalogue_ = std::move(catalogue);
  shards_ = std::move(shards);
}

void DumpTensors::read(std::string_view tensor, const Box& box, std::byte* data,
                       const Strides& strides) const {
  std::vector<Box> missing;
  if (!box.empty()) {
    missing.push_back(box);
  }
  for (const DumpShard& shard : shards(tensor)) {
    for (std::size_t i = 0; i < shard.compact.pieces.size() && !missing.empty(); ++i) {
      missing = read_from(shard, i, missing, box, data, strides);
    }
  }
  if (!missing.empty()) {
    throw Error(Errc::bad_argument, "no shard in '" + dump_.file().string() + "' holds " +
                                        to_string(missing.front()) + " of tensor '" +
                                        std::string(tensor) + "'");
  }
}

/// Reads what piece @p i has of @p missing. @return what is missing still.
std::vector<Box> DumpTensors::read_from(const DumpShard& shard, std::size_t i,
                                        const std::vector<Box>& missing, const Box& box,
                                        std::byte* data, const Strides& strides) const {
  const std::uint64_t item_bytes = bytes_of(shard.dtype);
  std::vector<Box> rest;
  for (const Box& wanted : missing) {
    const std::optional<Box> part = intersect(wanted, shard.compact.pieces[i].box);
    if (!part || part->empty()) {
      rest.push_back(wanted);
      continue;
    }
    Index at = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      at += (part->lo[d] - box.lo[d]) * strides[d];
    }
    read(shard, i, *part, data + at * static_cast<std::ptrdiff_t>(item_bytes), strides);
    subtract(wanted, *part, rest);
  }
  return rest;
}

void DumpTensors::read(const DumpShard& shard, std::size_t piece, const Box& box, std::byte* data,
                       const Strides& strides) const {
  check_once(shard);
  dump_.read(shard, piece, box, data, strides);
}

std::vector<std::byte> DumpTensors::read(const DumpShard& shard) const {
  check_once(shard);
  std::vector<std::byte> out(
      checked_mul_bytes(static_cast<std::uint64_t>(element_count(shard.compact.local_shape)),
                        bytes_of(shard.dtype), "bytes of a shard"));
  dump_.read(shard, out.data());
  return out;
}

void DumpTensors::check_once(const DumpShard& shard) const {
  if (!verify_) {
    return;
  }
  {
    const std::scoped_lock lock(checked_mutex_);
    if (checked_.contains(shard.path)) {
      return;
    }
  }
  dump_.verify(shard.path);
  const std::scoped_lock lock(checked_mutex_);
  checked_.insert(shard.path);
}

}  // namespace m2n
