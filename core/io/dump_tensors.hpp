// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The global tensors of one side of a dump, whatever ranks their elements lie on.

#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/api/values.hpp"
#include "core/io/dump.hpp"

namespace m2n {

/// - Threads: any; reads take turns (see DumpReader).
/// - Errors: Error{io} naming file and dataset; Error{bad_argument} for an unknown tensor or a box
///   that no shard holds.
class DumpTensors {
 public:
  /// @param verify  Compare each shard's checksum before its first element is read.
  /// @throws Error{io} besides, when shards of one tensor disagree about its dtype or shape.
  DumpTensors(const std::filesystem::path& file, Role side, bool verify = true);

  const DumpReader& dump() const noexcept { return dump_; }
  Role side() const noexcept { return side_; }
  /// Tensors of which the side holds anything: in the order of /params, then by name.
  const Catalogue& catalogue() const noexcept { return catalogue_; }
  bool contains(std::string_view tensor) const { return by_name_.contains(std::string(tensor)); }
  const TensorInfo& info(std::string_view tensor) const { return catalogue_[index_of(tensor)]; }
  /// By rank.
  const std::vector<DumpShard>& shards(std::string_view tensor) const {
    return shards_[index_of(tensor)];
  }

  /// The elements of @p box, which lies in the tensor, at @p data (element at box.lo) with
  /// @p strides in elements; from the first shards that hold them.
  void read(std::string_view tensor, const Box& box, std::byte* data, const Strides& strides) const;
  /// The elements of @p box, which lies in piece @p piece of @p shard.
  void read(const DumpShard& shard, std::size_t piece, const Box& box, std::byte* data,
            const Strides& strides) const;
  /// The whole compact tensor of @p shard.
  std::vector<std::byte> read(const DumpShard& shard) const;

 private:
  std::size_t index_of(std::string_view tensor) const;
  void in_declared_order();
  std::vector<Box> read_from(const DumpShard& shard, std::size_t i, const std::vector<Box>& missing,
                             const Box& box, std::byte* data, const Strides& strides) const;
  void check_once(const DumpShard& shard) const;

  DumpReader dump_;
  Role side_;
  bool verify_;
  Catalogue catalogue_;
  std::vector<std::vector<DumpShard>> shards_;  ///< By tensor.
  std::unordered_map<std::string, std::size_t> by_name_;
  mutable std::mutex checked_mutex_;
  mutable std::unordered_set<std::string> checked_;  ///< Paths whose checksum was right.
};

}  // namespace m2n
