// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The HDF5 dump of an experiment: written once, whole or not at all; read and checked later.
///
/// Schema, version 2. Ranks and indices count from 0; boxes are half-open and global; sizes in
/// elements but for *bytes*. `text` is one fixed-length UTF-8 string, `text[n]` a column of them,
/// padded with NUL. P parameters, L layouts, R regions, D the largest tensor rank (at least 1).
/// A rank below D (or 8) is padded: extents with 1, boxes with [0, 1).
///
///   /                    attrs format "m2n dump", schema_version u32, complete u8 = 1 (set last)
///   /experiment/<key>    text          one fact each, as the experiment gives them (config: the
///                                      file; topology, certificate, environment: JSON), and
///                                      problem_digest, plan_digest, hdf5_version, run_id
///   /params              one row a parameter, in the order in which it is sent
///     name path          text[P]       as the checkpoint has it; as it is escaped in this file
///     dtype              text[P]       at the source
///     destination_dtype  text[P]
///     rank u32[P], shape i64[P,8], cast u8[P], bytes u64[P] (whole, at the destination's dtype)
///     source_layout destination_layout u32[P]     index in /layouts
///     source_buffers destination_buffers text[P]  JSON list: names of the layout's buffer slots
///   /layouts             each distinct layout once
///     json               text          JSON list of canonical layouts
///     begin end          u64[L]        bytes of one layout in json
///   /plan                attrs planner text, digest text, stages u32; one row a region, in the
///                        order of parameters, then stages
///     parameter stage    u32[R]
///     source destination i32[R]        ranks
///     source_role destination_role u8[R]   0 source, 1 destination, 2 scratch
///     source_holding destination_holding u32[R]   holdings of the geometry (core/plan/plan.hpp)
///     lo hi              i64[R,D]      the box
///     bytes              u64[R]        at the destination's dtype
///   /plan/patterns       the same plan as it is run again: Q patterns, shared by parameters
///     planner            text
///     of_parameter first_stage u32[P]  the pattern of each parameter, and where its stages begin
///     source_layout destination_layout u32[Q], box_count move_count scratch_count u64[Q]
///     boxes/lo hi i64[,D]; moves/box from to stage u32[] (box, of the pattern's; holdings)
///     scratch/rank i32[], lo hi i64[,D], offset_bytes u64[]   pattern after pattern
///   /traffic             attr world_size i32; one row a pair of ranks that share a region, sorted;
///                        equal ranks: local copies
///     source destination i32[n], bytes regions u64[n]
///   /rounds              one row a round and rank
///     version u64[n], rank i32[n], seconds f64[n], copied_bytes u64[n]
///   /rounds/peers        one row a round, rank and peer
///     version u64[n], rank peer i32[n], sent_bytes received_bytes u64[n], path u32[n]
///     start end          f64[n]        seconds from the rank's start; NaN where nobody measures
///     paths              text[k]       the names that path numbers
///   /phases              one row a rank and phase: name text[n], rank i32[n], version u64[n] (0
///                        outside of rounds), start end f64[n] (seconds from the start of the job)
///   /digests             one row a side, rank and parameter, sorted: side u8[n] (0 source, 1
///                        destination), rank i32[n], parameter u32[n], digest u64[n] (DumpDigest)
///   /simulation          attr seconds f64; one row a simulated message, seconds from the start
///     start end          f64[n]
///     source destination i32[n], stage u32[n], bytes u64[n]
///   /simulation/ports    one row a port that carried bytes
///     name text[n], bytes u64[n], busy f64[n] (seconds)
///   /results/<table>     columns of a study, one row a case
///   /parts/file          text[n]       other dumps of the same run_id, in the same folder, that
///   hold
///                                      shards of this one
///   /shards/<source|destination>/<rank>/<path>   the rank's compact row-major tensor, element bits
///                        attrs name text, dtype text, dtype_number u8 (place in all_dtypes()),
///                        global_shape i64[d], and box i64[d,2] when it is one box; else the boxes
///                        are rows of
///   /pieces/<source|destination>/<rank>/<path>   {lo i64[d], hi i64[d], offset i64, strides
///                        i64[d]}[n]: each box, and where it lies in the compact tensor
///                        (<rank> is an external link where the shards lie in a part)
///   /tensors/<path>      the global tensor, stitched from the destination's shards (a virtual
///                        dataset, or a link where one rank holds it whole); only when they cover
///                        it
///   /source_tensors/<path>   likewise from the source's shards
///
/// Version 1 lacked /plan/patterns, /phases, /digests, /parts and /rounds/peers/start and end; its
/// plans can be looked at but not run again.
///
/// Elements are stored as HDF5's own little-endian type where it has one (integers of their width,
/// f16, f32, f64; c64 as {r, i}); bf16 as uint16; fp8 and bool as uint8. Nothing is converted.
/// Every stored dataset has an attribute `checksum` u64: XXH3-64 of its bytes in row-major order
/// (virtual datasets and links have none: their shards do). Text attributes but for `format` are of
/// variable length, which h5py gives as str; they end at a NUL.
/// Escaped paths: `/`, `%`, control bytes and a leading `.` become %XX; an empty name becomes `%`.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/api/transport.hpp"
#include "core/layout/layout.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/simulate.hpp"

namespace m2n {

inline constexpr std::uint32_t kDumpSchemaVersion = 2;

/// A name as one component of a path in a dump, and back. No two names share a path.
std::string dump_path_of(std::string_view name);
std::string name_of_dump_path(std::string_view path);

/// A column of a table of results: numbers or text, one a row.
struct DumpColumn {
  std::string name;
  std::variant<std::vector<double>, std::vector<std::uint64_t>, std::vector<std::string>> rows;
};

struct DumpOptions {
  /// 1 to 9: zlib, in chunks of at most 8 MiB. 0: as it is, so that a part of a shard is read by
  /// touching only its bytes.
  int deflate_level = 0;
  /// Tells the files of one run from those of another that had the same names; needed for parts.
  std::string run_id = {};
};

/// How long one rank was in one phase of a job, in seconds from the start of the job.
struct DumpPhase {
  std::string name;  ///< "connect", "prepare", "round", ...
  Rank rank = 0;
  std::uint64_t version = 0;  ///< Of the round; 0 outside of rounds.
  double start_seconds = 0;
  double end_seconds = 0;
};

/// Sum of digest_term() over what one rank holds of one parameter (core/tensor/digest.hpp).
struct DumpDigest {
  Role side = Role::source;
  Rank rank = 0;
  std::uint32_t parameter = 0;
  std::uint64_t digest = 0;
  friend auto operator<=>(const DumpDigest&, const DumpDigest&) = default;
};

/// Name of the part of @p dump that holds the shards of @p rank: "run.<run_id>.rank-3.h5".
std::string dump_part_name(const std::filesystem::path& dump, std::string_view run_id, Rank rank);
/// Names of the parts that the dump @p file refers to; none when it has none, or is no dump.
std::vector<std::string> dump_parts(const std::filesystem::path& file);

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
