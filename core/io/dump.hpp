// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The HDF5 dump of an experiment: written once, whole or not at all; read and checked later.
/// Its schema: core/io/dump_schema.hpp.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/transport.hpp"
#include "core/io/dump_schema.hpp"
#include "core/layout/layout.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/simulate.hpp"

namespace m2n {

/// Writes one dump under a temporary name; commit() gives it its own. Without commit() the
/// destructor removes it, and a dump that was there before stays as it was.
///
/// - Collective: no; one object a file.
/// - Threads: any; calls take turns, as do those of every dump in the process (HDF5's rule).
/// - Memory: nothing that is handed over is kept; a plan is written in blocks of bounded size.
/// - Streams: none.
/// - Errors: Error{io} naming the file, the action and the object. After one, only the destructor.
class DumpWriter {
 public:
  explicit DumpWriter(const std::filesystem::path& file, const DumpOptions& options = {});
  DumpWriter(const DumpWriter&) = delete;
  DumpWriter& operator=(const DumpWriter&) = delete;
  ~DumpWriter();

  /// Facts by key, among them "config": the experiment's text. @throws Error{bad_argument} for a
  /// key that was written before.
  void experiment(const std::map<std::string, std::string>& facts);
  /// /params and /layouts, and their digest: SHA-256 of one line a parameter (path, source layout,
  /// destination layout, cast, source buffers, destination buffers, with blanks between) and then
  /// of /layouts/json. Once.
  void problem(const Problem& problem);
  /// /plan and /traffic. Once. Cost: linear in the regions, in blocks.
  void plan(const Plan& plan, const Problem& problem);
  /// What @p rank measured in one round.
  void round(Rank rank, const RoundReport& report);
  /// One row of /phases, one of /digests.
  void phase(const DumpPhase& phase);
  void digest(const DumpDigest& digest);
  /// /simulation: what a simulated round looked like. Once.
  void timeline(const Timeline& timeline);
  /// /results/<name>: a table of anything, e.g. of a study. Columns have equally many rows.
  void results(const std::string& name, const std::vector<DumpColumn>& columns);
  /// @param compact  The rank's tensor as shard.local_shape says, row-major; may be null when that
  ///                 has no elements.
  void shard(Role side, Rank rank, const Parameter& parameter, const CompactShard& shard,
             const std::byte* compact);
  /// The same for a shard that lies in another dump, @p part: a plain name in the folder of this
  /// file. Its writer, perhaps in another process, has the same run_id, writes the shards of @p
  /// rank (all of them) and commits before this one does. Readers then find them here by their
  /// paths.
  void shard_in_part(const std::string& part, Role side, Rank rank, const Parameter& parameter,
                     const CompactShard& shard);
  /// Global tensors from the shards of @p side that are known so far. Once a side.
  void stitch(Role side);
  /// Completes the file, makes it durable, and gives it its name. Nothing may follow. Removes the
  /// parts of the dump that had the name before.
  /// @throws Error{io} besides, naming a part that is missing, unfinished or of another run.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A stored or stitched dataset, for lists.
struct DumpEntry {
  std::string path;  ///< "/params/name"
  std::string type;  ///< "u32", "text", "bf16", ...
  Shape shape;
  std::uint64_t bytes = 0;  ///< Of the whole dataset, before compression.
  bool stitched = false;    ///< Stores nothing itself.
};

/// One rank's compact local tensor in a dump.
struct DumpShard {
  Role side = Role::source;
  Rank rank = 0;
  std::string name;  ///< Of the parameter.
  std::string path;  ///< Of the dataset.
  DType dtype = DType::f32;
  Shape shape;           ///< Global.
  CompactShard compact;  ///< Views lie in the compact tensor.
};

/// Reads a complete dump.
///
/// - Threads: any; calls take turns, see DumpWriter.
/// - Errors: Error{io} naming the file and the dataset; the constructor says what the file is when
///   it is no dump (not HDF5, not ours, never completed, of a newer schema).
class DumpReader {
 public:
  explicit DumpReader(const std::filesystem::path& file);
  DumpReader(DumpReader&&) noexcept;
  DumpReader& operator=(DumpReader&&) noexcept;
  ~DumpReader();

  const std::filesystem::path& file() const noexcept;
  std::uint32_t schema_version() const noexcept;

  /// /experiment/<key>.
  std::optional<std::string> fact(std::string_view key) const;
  std::map<std::string, std::string> facts() const;
  /// Parameter names in their order; empty when the dump has no /params.
  std::vector<std::string> parameters() const;
  /// The problem and the plan as they were written, with equal digests. Their datasets' checksums
  /// are compared. @throws Error{io} besides, when there is none, or it contradicts itself.
  Problem problem() const;
  /// @param problem  Of problem(), or one of the same digest.
  Plan plan(const Problem& problem) const;
  /// Rows of /digests, sorted.
  std::vector<DumpDigest> digests() const;

  /// Every dataset, by path.
  std::vector<DumpEntry> entries() const;
  /// The shards of @p side, by rank and path.
  std::vector<DumpShard> shards(Role side) const;
  /// The whole compact tensor. @param out  Room for its elements, row-major.
  void read(const DumpShard& shard, std::byte* out) const;
  /// The elements of the global box @p inner, which lies in piece number @p piece of the shard, at
  /// @p out with @p strides in elements. Touches only their bytes (of an uncompressed shard).
  void read(const DumpShard& shard, std::size_t piece, const Box& inner, std::byte* out,
            const Strides& strides) const;
  /// A column or a small dataset, as its bytes. @throws Error{io} when it is missing.
  std::vector<std::byte> bytes(const std::string& path) const;
  /// Likewise as values. @throws Error{io} when their size is not the elements'.
  template <class Value>
  std::vector<Value> column(const std::string& path) const {
    const std::vector<std::byte> raw = bytes(path);
    expect_items(path, raw.size(), sizeof(Value));
    std::vector<Value> values(raw.size() / sizeof(Value));
    if (!values.empty()) {
      std::memcpy(values.data(), raw.data(), raw.size());
    }
    return values;
  }
  bool has(const std::string& path) const;

  /// Compares the checksum of one dataset, or of all. @throws Error{io} naming every dataset that
  /// is damaged or has no checksum. @return bytes compared.
  std::uint64_t verify(const std::string& path) const;
  std::uint64_t verify() const;

 private:
  void expect_items(const std::string& path, std::size_t bytes, std::size_t item_bytes) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a dump holds: a table for a person, or one JSON object.
std::string describe_dump(const std::filesystem::path& file, bool json);

}  // namespace m2n
