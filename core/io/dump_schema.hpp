// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What a dump of an experiment holds (see dump.hpp for writing and reading one).
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
///     scales i64[P], blocks i64[P,8]      of one that is quantised: row of the parameter that
///                                         holds its scales, and extents of a block; otherwise -1
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
///                                      hold shards of this one
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

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/layout/mesh.hpp"
#include "core/plan/problem.hpp"

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

}  // namespace m2n
