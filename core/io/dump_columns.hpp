// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the parts of DumpWriter share: columns that are filled row by row, and the open file.
/// Not installed.

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/io/atomic_file.hpp"
#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"

namespace m2n {

/// Columns are written in chunks, and so in blocks, of this size.
inline constexpr std::uint64_t kColumnChunkBytes = std::uint64_t{1} << 20;

void add_checksum(const h5::Dataset& dataset, const h5::Checksum& checksum);
/// As a word for people, and as a number for DumpReader.
void write_dtype(const h5::Owner& owner, DType dtype);
/// One text, as a scalar.
void write_text(const h5::File& file, const std::string& path, std::string_view text);

/// A dataset [rows] or [rows, width] that is filled row by row, holding one chunk in memory.
class Column {
 public:
  Column(const h5::File& file, const std::string& path, h5::Type type, std::uint64_t rows,
         std::size_t width, int deflate_level)
      : dataset_(h5::create_dataset(file, path, std::move(type), shape_of(rows, width),
                                    kColumnChunkBytes, deflate_level)),
        width_(width),
        row_bytes_(dataset_.type.bytes * std::max<std::size_t>(width, 1)),
        buffer_(std::min(std::max<std::uint64_t>(kColumnChunkBytes / row_bytes_, 1),
                         std::max<std::uint64_t>(rows, 1)) *
                row_bytes_) {}

  void append(const void* row) {
    std::memcpy(buffer_.data() + used_, row, row_bytes_);
    advance();
  }
  template <class Value>
  void add(Value value) {
    std::memcpy(buffer_.data() + used_, &value, sizeof value);
    advance();
  }
  /// Padded with NUL.
  void add_text(std::string_view text) {
    std::string row(text);
    row.resize(row_bytes_, '\0');
    append(row.data());
  }

  void finish() {
    flush();
    add_checksum(dataset_, checksum_);
  }

 private:
  static Shape shape_of(std::uint64_t rows, std::size_t width) {
    Shape shape{static_cast<Index>(rows)};
    if (width > 0) {
      shape.push_back(static_cast<Index>(width));
    }
    return shape;
  }

  void advance() {
    used_ += row_bytes_;
    if (used_ == buffer_.size()) {
      flush();
    }
  }

  void flush() {
    if (used_ == 0) {
      return;
    }
    Box box{Dims{written_}, Dims{written_ + static_cast<Index>(used_ / row_bytes_)}};
    written_ = box.hi[0];
    if (width_ > 0) {
      box.lo.push_back(0);
      box.hi.push_back(static_cast<Index>(width_));
    }
    h5::write_box(dataset_, box, buffer_.data());
    checksum_.add(buffer_.data(), used_);
    used_ = 0;
  }

  h5::Dataset dataset_;
  std::size_t width_;
  std::uint64_t row_bytes_;
  std::vector<std::byte> buffer_;
  std::uint64_t used_ = 0;
  h5::Checksum checksum_;
  Index written_ = 0;
};

/// Makes the columns of one table.
struct Table {
  const h5::File& file;
  std::string group;
  std::uint64_t rows;
  int deflate_level;

  Column column(const char* name, DType dtype, std::size_t width = 0) const {
    return {file, group + "/" + name, h5::type_of(dtype), rows, width, deflate_level};
  }
  Column text_column(const char* name, std::uint64_t longest) const {
    return {file, group + "/" + name, h5::text_type(longest), rows, 0, deflate_level};
  }
};

template <class... Columns>
void finish(Columns&... columns) {
  (columns.finish(), ...);
}

/// Numbers the distinct layouts of a problem, in the order in which they are first asked for.
class LayoutNumbers {
 public:
  std::uint32_t number_of(const Layout& layout);
  /// JSON list of the canonical layouts.
  std::string json() const { return json_ + "\n]"; }
  /// Bytes of each in json().
  const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges() const { return ranges_; }

 private:
  // Layouts are mostly shared objects; equal ones that are not still share their text.
  std::unordered_map<const Layout*, std::uint32_t> by_pointer_;
  std::unordered_map<std::string, std::uint32_t> by_text_;
  std::string json_ = "[";
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;
};

std::string json_list(const std::vector<std::string>& names);
/// SHA-256 of one line a parameter (path, number of the source's layout, of the destination's, cast
/// as 0 or 1, both sides' buffers, with blanks between) and then of LayoutNumbers::json().
std::string problem_digest(const Problem& problem, LayoutNumbers& layouts);

/// A shard, for stitching.
struct StoredShard {
  std::string file;  ///< The part that holds it; empty for this file.
  std::string path;
  CompactShard geometry;
};

/// Where the shards of one parameter and side lie.
struct Stored {
  DType dtype = DType::f32;
  Shape shape;
  std::vector<StoredShard> shards;
};

/// "source/3/name", below /shards and /pieces.
std::string shard_tail(Role side, Rank rank, const std::string& name);
/// True when the shard is all of one box, which then is an attribute and needs no /pieces.
bool is_one_box(const CompactShard& shard);

struct DumpWriter::Impl {
  Impl(AtomicFile target_file, DumpOptions given, h5::File opened)
      : target(std::move(target_file)), options(std::move(given)), file(std::move(opened)) {}

  AtomicFile target;
  DumpOptions options;
  h5::File file;
  std::vector<std::pair<Rank, RoundReport>> rounds;
  /// By side, then by name in order of arrival.
  std::map<Role, std::vector<std::pair<std::string, Stored>>> stored;
  std::map<Role, std::unordered_map<std::string, std::size_t>> stored_index;
  LayoutNumbers layouts;
  std::vector<DumpPhase> phases;
  std::vector<DumpDigest> digests;
  std::vector<std::string> parts;  ///< Names of the files that hold shards, in order of arrival.
  std::set<std::string> links;     ///< Groups that lie in parts.
  bool committed = false;

  void expect_open() const { expects(!committed, "nothing to follow commit()"); }
  /// Chunks only where they are needed: for compression.
  std::uint64_t chunk_bytes() const {
    return options.deflate_level > 0 ? h5::kLargestChunkBytes : 0;
  }
  Table table(const std::string& group, std::uint64_t rows) const {
    h5::create_group(file, group);
    return {file, group, rows, options.deflate_level};
  }
  void write_pieces(const std::string& path, const CompactShard& shard, std::uint64_t item_bytes);
  void remember(Role side, const Parameter& parameter, StoredShard shard);
  void write_rounds();
  void write_phases();
  void write_digests();
  /// @throws Error{io} naming a part that is missing, unfinished or of another run.
  void write_parts();
  void write_patterns(const Plan& plan, std::size_t width);
};

}  // namespace m2n
