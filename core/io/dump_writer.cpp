// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/json.hpp>
#include <cstring>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/io/atomic_file.hpp"
#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"

namespace m2n {
namespace {

/// Columns are written in chunks, and so in blocks, of this size.
constexpr std::uint64_t kColumnChunkBytes = std::uint64_t{1} << 20;

void add_checksum(const h5::Dataset& dataset, const h5::Checksum& checksum) {
  const std::uint64_t value = checksum.value();
  h5::write_attribute(h5::owner_of(dataset), "checksum", DType::u64, {}, &value);
}

/// As a word for people, and as a number for DumpReader.
void write_dtype(const h5::Owner& owner, DType dtype) {
  const auto number = static_cast<std::uint8_t>(dtype);
  h5::write_attribute(owner, "dtype", std::string(to_string(dtype)));
  h5::write_attribute(owner, "dtype_number", DType::u8, {}, &number);
}

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

std::string json_list(const std::vector<std::string>& names) {
  boost::json::array list;
  for (const std::string& name : names) {
    list.emplace_back(name);
  }
  return boost::json::serialize(list);
}

void write_text(const h5::File& file, const std::string& path, std::string_view text) {
  static constexpr char kNul = '\0';
  const std::string_view bytes = text.empty() ? std::string_view(&kNul, 1) : text;
  const h5::Dataset dataset = h5::create_dataset(file, path, h5::text_type(bytes.size()), Shape{});
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  h5::write_box(dataset, Box{}, data);
  h5::Checksum checksum;
  checksum.add(data, bytes.size());
  add_checksum(dataset, checksum);
}

/// Where the shards of one parameter and side lie, for stitching.
struct Stored {
  DType dtype = DType::f32;
  Shape shape;
  std::vector<std::pair<std::string, CompactShard>> shards;
};

/// Along one dimension: intervals of one size at one distance, and where the first lies in the
/// compact tensor.
struct RegularRun {
  Index start = 0;
  Index stride = 0;
  Index count = 0;
  Index size = 0;
  Index local = 0;
};

std::vector<RegularRun> regular_runs(const std::vector<Interval>& intervals) {
  std::vector<RegularRun> runs;
  Index local = 0;
  for (const Interval& interval : intervals) {
    if (!runs.empty()) {
      RegularRun& last = runs.back();
      const Index stride = interval.begin - (last.start + (last.count - 1) * last.stride);
      if (interval.size() == last.size && (last.count == 1 || stride == last.stride)) {
        last.stride = stride;
        ++last.count;
        local += interval.size();
        continue;
      }
    }
    runs.push_back({interval.begin, interval.size(), 1, interval.size(), local});
    local += interval.size();
  }
  return runs;
}

/// The intervals of each dimension when the boxes are a grid, in ascending order, that fills a
/// row-major tensor of @p local_shape.
std::optional<std::vector<std::vector<Interval>>> grid_of(const CompactShard& shard,
                                                          std::uint64_t item_bytes) {
  const std::size_t rank = shard.local_shape.size();
  if (shard.pieces.empty() || shard.pieces.front().box.rank() != rank) {
    return std::nullopt;
  }
  std::vector<std::vector<Interval>> lists(rank);
  std::uint64_t cells = 1;
  for (std::size_t d = 0; d < rank; ++d) {
    std::set<Interval> distinct;
    for (const Piece& piece : shard.pieces) {
      distinct.insert(piece.box[d]);
    }
    lists[d].assign(distinct.begin(), distinct.end());
    Index length = 0;
    for (std::size_t i = 0; i < lists[d].size(); ++i) {
      if (i > 0 && lists[d][i].begin < lists[d][i - 1].end) {
        return std::nullopt;
      }
      length += lists[d][i].size();
    }
    if (length != shard.local_shape[d]) {
      return std::nullopt;
    }
    cells *= lists[d].size();
    if (cells > shard.pieces.size()) {
      return std::nullopt;
    }
  }
  if (cells != shard.pieces.size()) {
    return std::nullopt;
  }
  const Strides strides = row_major(shard.local_shape);
  std::set<Box> boxes;
  for (const Piece& piece : shard.pieces) {
    Index offset = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      Index local = 0;
      for (const Interval& interval : lists[d]) {
        if (interval == piece.box[d]) {
          break;
        }
        local += interval.size();
      }
      offset += local * strides[d];
      if (piece.box[d].size() > 1 && piece.view.strides[d] != strides[d]) {
        return std::nullopt;
      }
    }
    if (piece.view.offset_bytes != static_cast<std::uint64_t>(offset) * item_bytes ||
        !boxes.insert(piece.box).second) {
      return std::nullopt;
    }
  }
  return lists;
}

/// True when the piece's elements follow one another in the compact tensor.
bool is_one_run(const Piece& piece) {
  Index expected = 1;
  for (std::size_t d = piece.box.rank(); d-- > 0;) {
    const Index size = piece.box[d].size();
    if (size > 1 && piece.view.strides[d] != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

/// How the elements of one shard lie in the global tensor, in as few mappings as it takes.
/// @throws Error{bad_argument} when the compact tensor is neither a grid nor a list of runs.
void map_shard(const std::string& path, const CompactShard& shard, std::uint64_t item_bytes,
               std::vector<h5::Mapping>& out) {
  const std::size_t rank = shard.local_shape.size();
  if (const auto grid = grid_of(shard, item_bytes)) {
    std::vector<std::vector<RegularRun>> runs;
    for (const std::vector<Interval>& intervals : *grid) {
      runs.push_back(regular_runs(intervals));
    }
    std::vector<std::size_t> at(rank, 0);
    for (;;) {
      h5::Mapping mapping{path, shard.local_shape, {}, {}, {}, {}, {}};
      for (std::size_t d = 0; d < rank; ++d) {
        const RegularRun& run = runs[d][at[d]];
        mapping.source_box.lo.push_back(run.local);
        mapping.source_box.hi.push_back(run.local + run.count * run.size);
        mapping.start.push_back(run.start);
        mapping.stride.push_back(run.stride);
        mapping.count.push_back(run.count);
        mapping.block.push_back(run.size);
      }
      out.push_back(std::move(mapping));
      std::size_t d = rank;
      while (d > 0 && ++at[d - 1] == runs[d - 1].size()) {
        at[--d] = 0;
      }
      if (d == 0) {
        return;
      }
    }
  }
  for (const Piece& piece : shard.pieces) {
    if (rank != 1 || !is_one_run(piece)) {
      throw Error(Errc::bad_argument, "shard '" + path + "' cannot be stitched: box " +
                                          to_string(piece.box) +
                                          " is neither part of a grid nor contiguous in it");
    }
    const Shape extents = piece.box.extents();
    const auto start = static_cast<Index>(piece.view.offset_bytes / item_bytes);
    out.push_back({path,
                   shard.local_shape,
                   {Dims{start}, Dims{start + piece.box.volume()}},
                   piece.box.lo,
                   extents,
                   Dims::filled(extents.size(), 1),
                   extents});
  }
}

/// True when @p boxes cover a tensor of @p shape. Sorted, so that little remains open at a time.
bool covers(const Shape& shape, const std::set<Box>& boxes) {
  std::vector<Box> open{Box::whole(shape)};
  for (const Box& box : boxes) {
    std::vector<Box> next;
    for (const Box& part : open) {
      subtract(part, box, next);
    }
    open = std::move(next);
  }
  return open.empty();
}

}  // namespace

std::string dump_path_of(std::string_view name) {
  if (name.empty()) {
    return "%";  // never the escape of anything else
  }
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    if (byte < 0x20 || byte == 0x7f || byte == '/' || byte == '%' || (byte == '.' && i == 0)) {
      constexpr std::string_view kDigits = "0123456789ABCDEF";
      out += '%';
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += name[i];
    }
  }
  return out;
}

std::string name_of_dump_path(std::string_view path) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (path == "%") {
    return "";
  }
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (path[i] == '%' && i + 2 < path.size() && digit(path[i + 1]) >= 0 &&
        digit(path[i + 2]) >= 0) {
      out += static_cast<char>(digit(path[i + 1]) * 16 + digit(path[i + 2]));
      i += 2;
    } else {
      out += path[i];
    }
  }
  return out;
}

/// Bytes and regions by pair of ranks.
using Traffic = std::map<std::pair<Rank, Rank>, std::pair<std::uint64_t, std::uint64_t>>;

struct DumpWriter::Impl {
  AtomicFile target;
  DumpOptions options;
  h5::File file;
  std::vector<std::pair<Rank, RoundReport>> rounds;
  /// By side, then by name in order of arrival.
  std::map<Role, std::vector<std::pair<std::string, Stored>>> stored;
  std::map<Role, std::unordered_map<std::string, std::size_t>> stored_index;
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
  void write_rounds();
  void write_traffic(const Traffic& traffic, Rank world_size);
};

DumpWriter::DumpWriter(const std::filesystem::path& file, const DumpOptions& options) {
  expects(options.deflate_level >= 0 && options.deflate_level <= 9, "deflate_level in 0..9");
  const h5::Lock lock;
  AtomicFile target(file);
  h5::File opened = h5::create_file(target.path());
  opened.path = target.target();  // what messages should name
  impl_ = std::make_unique<Impl>(Impl{std::move(target), options, std::move(opened), {}, {}, {}});
  const h5::Owner root{impl_->file.object, "'" + file.string() + "'"};
  h5::write_fixed_attribute(root, "format", "m2n dump");
  h5::write_attribute(root, "schema_version", DType::u32, {}, &kDumpSchemaVersion);
  write_text(impl_->file, "/experiment/hdf5_version", h5::library_version());
}

DumpWriter::~DumpWriter() {
  const h5::Lock lock;
  impl_.reset();  // closes the file, then removes it unless it was committed
}

void DumpWriter::experiment(const std::map<std::string, std::string>& facts) {
  const h5::Lock lock;
  impl_->expect_open();
  for (const auto& [key, text] : facts) {
    const std::string path = "/experiment/" + dump_path_of(key);
    if (h5::exists(impl_->file, path)) {
      throw Error(Errc::bad_argument, "'" + path + "' was written before; a fact is written once");
    }
    write_text(impl_->file, path, text);
  }
}

void DumpWriter::problem(const Problem& problem) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::vector<Parameter>& parameters = problem.parameters();
  std::uint64_t longest_name = 0;
  std::uint64_t longest_path = 0;
  std::uint64_t longest_dtype = 0;
  std::uint64_t longest_buffers = 0;
  for (const Parameter& parameter : parameters) {
    for (const Side* side : {&parameter.source, &parameter.destination}) {
      longest_buffers = std::max<std::uint64_t>(longest_buffers, json_list(side->buffers).size());
    }
    longest_name = std::max<std::uint64_t>(longest_name, parameter.name.size());
    longest_path = std::max<std::uint64_t>(longest_path, dump_path_of(parameter.name).size());
    for (const DType dtype : {parameter.source_dtype(), parameter.destination_dtype()}) {
      longest_dtype = std::max<std::uint64_t>(longest_dtype, to_string(dtype).size());
    }
  }

  const Table table = impl_->table("/params", parameters.size());
  Column name = table.text_column("name", longest_name);
  Column path = table.text_column("path", longest_path);
  Column dtype = table.text_column("dtype", longest_dtype);
  Column destination_dtype = table.text_column("destination_dtype", longest_dtype);
  Column rank = table.column("rank", DType::u32);
  Column shape = table.column("shape", DType::i64, kMaxRank);
  Column cast = table.column("cast", DType::u8);
  Column bytes = table.column("bytes", DType::u64);
  Column source_layout = table.column("source_layout", DType::u32);
  Column destination_layout = table.column("destination_layout", DType::u32);

  Column source_buffers = table.text_column("source_buffers", longest_buffers);
  Column destination_buffers = table.text_column("destination_buffers", longest_buffers);
  std::string identity;

  // Layouts are mostly shared objects; equal ones that are not still share their text.
  std::string json = "[";
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  std::unordered_map<const Layout*, std::uint32_t> by_pointer;
  std::unordered_map<std::string, std::uint32_t> by_text;
  const auto number_of = [&](const Layout* layout) {
    const auto [known, is_new] = by_pointer.try_emplace(layout, 0);
    if (is_new) {
      const auto next = static_cast<std::uint32_t>(by_text.size());
      const auto [entry, inserted] = by_text.try_emplace(layout->canonical_json(), next);
      known->second = entry->second;
      if (inserted) {
        json += next == 0 ? "\n" : ",\n";
        ranges.emplace_back(json.size(), json.size() + entry->first.size());
        json += entry->first;
      }
    }
    return known->second;
  };

  for (const Parameter& parameter : parameters) {
    name.add_text(parameter.name);
    path.add_text(dump_path_of(parameter.name));
    dtype.add_text(to_string(parameter.source_dtype()));
    destination_dtype.add_text(to_string(parameter.destination_dtype()));
    rank.add(static_cast<std::uint32_t>(parameter.shape.size()));
    Shape padded = parameter.shape;
    while (padded.size() < kMaxRank) {
      padded.push_back(1);
    }
    shape.append(padded.begin());
    cast.add(static_cast<std::uint8_t>(parameter.cast));
    bytes.add(parameter.bytes());
    const std::uint32_t source_number = number_of(parameter.source.layout.get());
    const std::uint32_t destination_number = number_of(parameter.destination.layout.get());
    source_layout.add(source_number);
    destination_layout.add(destination_number);
    source_buffers.add_text(json_list(parameter.source.buffers));
    destination_buffers.add_text(json_list(parameter.destination.buffers));
    identity += dump_path_of(parameter.name) + " " + std::to_string(source_number) + " " +
                std::to_string(destination_number) + (parameter.cast ? " 1 " : " 0 ") +
                json_list(parameter.source.buffers) + " " +
                json_list(parameter.destination.buffers) + "\n";
  }
  finish(name, path, dtype, destination_dtype, rank, shape, cast, bytes, source_layout,
         destination_layout, source_buffers, destination_buffers);

  json += "\n]";
  experiment({{"problem_digest", sha256_hex(identity + json)}});
  const Table layouts = impl_->table("/layouts", ranges.size());
  write_text(impl_->file, "/layouts/json", json);
  Column begin = layouts.column("begin", DType::u64);
  Column end = layouts.column("end", DType::u64);
  for (const auto& [from, to] : ranges) {
    begin.add(from);
    end.add(to);
  }
  finish(begin, end);
}

void DumpWriter::plan(const Plan& plan, const Problem& problem) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::vector<Parameter>& parameters = problem.parameters();
  if (plan.pattern_of.size() != parameters.size() || plan.first_stage.size() != parameters.size()) {
    throw Error(Errc::bad_plan, "the plan is for " + std::to_string(plan.pattern_of.size()) +
                                    " parameters, and the problem has " +
                                    std::to_string(parameters.size()));
  }
  std::uint64_t rows = 0;
  std::size_t width = 1;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    rows = checked_add_bytes(rows, plan.patterns.at(plan.pattern_of[i]).moves.size(), "regions");
    width = std::max(width, parameters[i].shape.size());
  }
  experiment({{"plan_digest", plan.digest}});

  const Table table = impl_->table("/plan", rows);
  {
    const h5::Object group = h5::open_group(impl_->file, "/plan");
    const h5::Owner owner{group, "group '/plan'"};
    h5::write_attribute(owner, "planner", plan.planner);
    h5::write_attribute(owner, "digest", plan.digest);
    h5::write_attribute(owner, "stages", DType::u32, {}, &plan.stage_count);
  }
  Column parameter = table.column("parameter", DType::u32);
  Column stage = table.column("stage", DType::u32);
  Column source = table.column("source", DType::i32);
  Column destination = table.column("destination", DType::i32);
  Column source_role = table.column("source_role", DType::u8);
  Column destination_role = table.column("destination_role", DType::u8);
  Column source_holding = table.column("source_holding", DType::u32);
  Column destination_holding = table.column("destination_holding", DType::u32);
  Column lo = table.column("lo", DType::i64, width);
  Column hi = table.column("hi", DType::i64, width);
  Column bytes = table.column("bytes", DType::u64);

  std::vector<Index> padded_lo(width);
  std::vector<Index> padded_hi(width);
  for (std::uint32_t i = 0; i < parameters.size(); ++i) {
    const Pattern& pattern = plan.patterns[plan.pattern_of[i]];
    for (const Move& move : pattern.moves) {
      const Rank from = pattern.rank_of(move.from);
      const Rank to = pattern.rank_of(move.to);
      const Box& box = pattern.boxes[move.box];
      for (std::size_t d = 0; d < width; ++d) {
        padded_lo[d] = d < box.rank() ? box.lo[d] : 0;
        padded_hi[d] = d < box.rank() ? box.hi[d] : 1;
      }
      parameter.add(i);
      stage.add(plan.first_stage[i] + move.stage);
      source.add(from);
      destination.add(to);
      source_role.add(static_cast<std::uint8_t>(pattern.role_of(move.from)));
      destination_role.add(static_cast<std::uint8_t>(pattern.role_of(move.to)));
      source_holding.add(move.from);
      destination_holding.add(move.to);
      lo.append(padded_lo.data());
      hi.append(padded_hi.data());
      bytes.add(pattern.move_bytes(move));
    }
  }
  finish(parameter, stage, source, destination, source_role, destination_role, source_holding,
         destination_holding, lo, hi, bytes);

  // Parameters of one pattern move alike, so their traffic is that of one, times their number.
  std::vector<std::uint64_t> users(plan.patterns.size(), 0);
  for (const std::uint32_t number : plan.pattern_of) {
    ++users[number];
  }
  Traffic traffic;
  for (std::size_t i = 0; i < plan.patterns.size(); ++i) {
    const Pattern& pattern = plan.patterns[i];
    for (const Move& move : pattern.moves) {
      auto& [pair_bytes, pair_regions] =
          traffic[{pattern.rank_of(move.from), pattern.rank_of(move.to)}];
      pair_bytes =
          checked_add_bytes(pair_bytes, checked_mul_bytes(pattern.move_bytes(move), users[i]));
      pair_regions += users[i];
    }
  }
  std::erase_if(traffic, [](const auto& entry) { return entry.second.second == 0; });
  impl_->write_traffic(traffic, problem.world_size());
}

void DumpWriter::Impl::write_traffic(const Traffic& traffic, Rank world_size) {
  const Table pairs = table("/traffic", traffic.size());
  {
    const h5::Object group = h5::open_group(file, "/traffic");
    h5::write_attribute({group, "group '/traffic'"}, "world_size", DType::i32, {}, &world_size);
  }
  Column source = pairs.column("source", DType::i32);
  Column destination = pairs.column("destination", DType::i32);
  Column bytes = pairs.column("bytes", DType::u64);
  Column regions = pairs.column("regions", DType::u64);
  for (const auto& [ranks, sums] : traffic) {
    source.add(ranks.first);
    destination.add(ranks.second);
    bytes.add(sums.first);
    regions.add(sums.second);
  }
  finish(source, destination, bytes, regions);
}

void DumpWriter::round(Rank rank, const RoundReport& report) {
  const h5::Lock lock;
  impl_->expect_open();
  impl_->rounds.emplace_back(rank, report);
}

void DumpWriter::timeline(const Timeline& timeline) {
  const h5::Lock lock;
  impl_->expect_open();
  const Table events = impl_->table("/simulation", timeline.events.size());
  {
    const h5::Object group = h5::open_group(impl_->file, "/simulation");
    h5::write_attribute({group, "group '/simulation'"}, "seconds", DType::f64, {},
                        &timeline.seconds);
  }
  Column start = events.column("start", DType::f64);
  Column end = events.column("end", DType::f64);
  Column source = events.column("source", DType::i32);
  Column destination = events.column("destination", DType::i32);
  Column stage = events.column("stage", DType::u32);
  Column bytes = events.column("bytes", DType::u64);
  for (const TimelineEvent& event : timeline.events) {
    start.add(event.start);
    end.add(event.end);
    source.add(event.from);
    destination.add(event.to);
    stage.add(event.stage);
    bytes.add(event.bytes);
  }
  finish(start, end, source, destination, stage, bytes);

  const Table ports = impl_->table("/simulation/ports", timeline.ports.size());
  std::uint64_t longest = 0;
  for (const Timeline::Port& port : timeline.ports) {
    longest = std::max<std::uint64_t>(longest, port.name.size());
  }
  Column name(impl_->file, "/simulation/ports/name", h5::text_type(longest), timeline.ports.size(),
              0, impl_->options.deflate_level);
  Column port_bytes = ports.column("bytes", DType::u64);
  Column busy = ports.column("busy", DType::f64);
  for (const Timeline::Port& port : timeline.ports) {
    name.add_text(port.name);
    port_bytes.add(port.bytes);
    busy.add(port.busy);
  }
  finish(name, port_bytes, busy);
}

void DumpWriter::results(const std::string& name, const std::vector<DumpColumn>& columns) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::string group = "/results/" + dump_path_of(name);
  h5::create_group(impl_->file, group);
  std::optional<std::size_t> rows;
  for (const DumpColumn& column : columns) {
    std::visit(
        [&](const auto& values) {
          using Value = typename std::decay_t<decltype(values)>::value_type;
          if (rows.value_or(values.size()) != values.size()) {
            throw Error(Errc::bad_argument, "column '" + column.name + "' of '" + group + "' has " +
                                                std::to_string(values.size()) + " rows, not " +
                                                std::to_string(*rows));
          }
          rows = values.size();
          const std::string path = group + "/" + dump_path_of(column.name);
          h5::Type type = h5::type_of(std::is_same_v<Value, double> ? DType::f64 : DType::u64);
          if constexpr (std::is_same_v<Value, std::string>) {
            std::uint64_t longest = 0;
            for (const std::string& text : values) {
              longest = std::max<std::uint64_t>(longest, text.size());
            }
            type = h5::text_type(longest);
          }
          Column out(impl_->file, path, std::move(type), values.size(), 0,
                     impl_->options.deflate_level);
          for (const Value& value : values) {
            if constexpr (std::is_same_v<Value, std::string>) {
              out.add_text(value);
            } else {
              out.add(value);
            }
          }
          out.finish();
        },
        column.rows);
  }
}

void DumpWriter::Impl::write_rounds() {
  std::uint64_t peer_rows = 0;
  std::uint64_t longest_path = 0;
  std::map<std::string, std::uint32_t> numbers;
  std::vector<std::string_view> names;
  for (const auto& [rank, report] : rounds) {
    peer_rows += report.peers.size();
    for (const PeerTraffic& peer : report.peers) {
      const auto [entry, is_new] =
          numbers.try_emplace(peer.path, static_cast<std::uint32_t>(names.size()));
      if (is_new) {
        names.push_back(entry->first);
        longest_path = std::max<std::uint64_t>(longest_path, entry->first.size());
      }
    }
  }

  const Table per_rank = table("/rounds", rounds.size());
  Column version = per_rank.column("version", DType::u64);
  Column rank = per_rank.column("rank", DType::i32);
  Column seconds = per_rank.column("seconds", DType::f64);
  Column copied_bytes = per_rank.column("copied_bytes", DType::u64);
  const Table per_peer = table("/rounds/peers", peer_rows);
  Column peer_version = per_peer.column("version", DType::u64);
  Column peer_rank = per_peer.column("rank", DType::i32);
  Column peer = per_peer.column("peer", DType::i32);
  Column sent_bytes = per_peer.column("sent_bytes", DType::u64);
  Column received_bytes = per_peer.column("received_bytes", DType::u64);
  Column path = per_peer.column("path", DType::u32);
  for (const auto& [of, report] : rounds) {
    version.add(report.version);
    rank.add(of);
    seconds.add(report.seconds);
    copied_bytes.add(report.copied_bytes);
    for (const PeerTraffic& traffic : report.peers) {
      peer_version.add(report.version);
      peer_rank.add(of);
      peer.add(traffic.peer);
      sent_bytes.add(traffic.sent_bytes);
      received_bytes.add(traffic.received_bytes);
      path.add(numbers.at(traffic.path));
    }
  }
  finish(version, rank, seconds, copied_bytes, peer_version, peer_rank, peer, sent_bytes,
         received_bytes, path);

  Column paths(file, "/rounds/peers/paths", h5::text_type(longest_path), names.size(), 0,
               options.deflate_level);
  for (const std::string_view name : names) {
    paths.add_text(name);
  }
  paths.finish();
}

void DumpWriter::Impl::write_pieces(const std::string& path, const CompactShard& shard,
                                    std::uint64_t item_bytes) {
  const std::size_t rank = shard.pieces.front().box.rank();
  Column pieces(file, path, h5::piece_type(rank), shard.pieces.size(), 0, options.deflate_level);
  std::vector<Index> row;
  for (const Piece& piece : shard.pieces) {
    row.assign(piece.box.lo.begin(), piece.box.lo.end());
    row.insert(row.end(), piece.box.hi.begin(), piece.box.hi.end());
    row.push_back(static_cast<Index>(piece.view.offset_bytes / item_bytes));
    row.insert(row.end(), piece.view.strides.begin(), piece.view.strides.end());
    pieces.append(row.data());
  }
  pieces.finish();
}

void DumpWriter::shard(Role side, Rank rank, const Parameter& parameter, const CompactShard& shard,
                       const std::byte* compact) {
  expects(side != Role::scratch, "a side: source or destination");
  const DType dtype =
      side == Role::source ? parameter.source_dtype() : parameter.destination_dtype();
  const std::uint64_t item_bytes = bytes_of(dtype);
  const Index elements = element_count(shard.local_shape);
  expects(elements == 0 || compact != nullptr, "the shard's elements");
  const std::string name = dump_path_of(parameter.name);
  const std::string tail = std::string(to_string(side)) + "/" + std::to_string(rank) + "/" + name;

  h5::Checksum checksum;  // before the lock: it reads every byte
  checksum.add(compact, static_cast<std::uint64_t>(elements) * item_bytes);

  const h5::Lock lock;
  impl_->expect_open();
  const h5::Dataset dataset =
      h5::create_dataset(impl_->file, "/shards/" + tail, h5::type_of(dtype), shard.local_shape,
                         impl_->chunk_bytes(), impl_->options.deflate_level);
  if (elements > 0) {
    h5::write_box(dataset, Box::whole(shard.local_shape), compact);
  }
  const h5::Owner owner = h5::owner_of(dataset);
  add_checksum(dataset, checksum);
  h5::write_attribute(owner, "name", parameter.name);
  write_dtype(owner, dtype);
  const auto dims = static_cast<Index>(parameter.shape.size());
  h5::write_attribute(owner, "global_shape", DType::i64, Shape{dims}, parameter.shape.begin());
  const bool one_box =
      shard.pieces.size() == 1 && shard.pieces.front().box.extents() == shard.local_shape;
  if (one_box) {
    const Box& box = shard.pieces.front().box;
    std::vector<Index> ends;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      ends.push_back(box.lo[d]);
      ends.push_back(box.hi[d]);
    }
    h5::write_attribute(owner, "box", DType::i64, Shape{dims, 2}, ends.data());
  } else if (!shard.pieces.empty()) {
    impl_->write_pieces("/pieces/" + tail, shard, item_bytes);
  }

  auto& side_stored = impl_->stored[side];
  const auto [entry, is_new] =
      impl_->stored_index[side].try_emplace(parameter.name, side_stored.size());
  if (is_new) {
    side_stored.push_back({parameter.name, {dtype, parameter.shape, {}}});
  }
  side_stored[entry->second].second.shards.emplace_back("/shards/" + tail, shard);
}

void DumpWriter::stitch(Role side) {
  expects(side != Role::scratch, "a side: source or destination");
  const h5::Lock lock;
  impl_->expect_open();
  const std::string group = side == Role::destination ? "/tensors" : "/source_tensors";
  h5::create_group(impl_->file, group);
  for (const auto& [name, stored] : impl_->stored[side]) {
    const std::string path = group + "/" + dump_path_of(name);
    const Box whole = Box::whole(stored.shape);
    const bool empty = element_count(stored.shape) == 0;
    std::set<Box> boxes;
    std::vector<h5::Mapping> mappings;
    const std::string* holder = nullptr;  // of the whole tensor
    for (const auto& [shard_path, shard] : stored.shards) {
      if (shard.local_shape == stored.shape &&
          (empty || (shard.pieces.size() == 1 && shard.pieces.front().box == whole))) {
        holder = &shard_path;
        break;
      }
      bool is_new = false;
      for (const Piece& piece : shard.pieces) {
        is_new = boxes.insert(piece.box).second || is_new;
      }
      if (is_new) {  // otherwise a replica
        map_shard(shard_path, shard, bytes_of(stored.dtype), mappings);
      }
    }
    if (holder != nullptr) {
      h5::link(impl_->file, *holder, path);
    } else if (empty) {
      const h5::Dataset dataset =
          h5::create_dataset(impl_->file, path, h5::type_of(stored.dtype), stored.shape);
      write_dtype(h5::owner_of(dataset), stored.dtype);
      add_checksum(dataset, {});
    } else if (covers(stored.shape, boxes)) {
      const h5::Dataset dataset =
          h5::create_virtual(impl_->file, path, h5::type_of(stored.dtype), stored.shape, mappings);
      h5::write_attribute(h5::owner_of(dataset), "name", name);
      write_dtype(h5::owner_of(dataset), stored.dtype);
    }
  }
}

void DumpWriter::commit() {
  const h5::Lock lock;
  impl_->expect_open();
  impl_->write_rounds();
  constexpr std::uint8_t kYes = 1;
  h5::write_attribute({impl_->file.object, "'" + impl_->file.path.string() + "'"}, "complete",
                      DType::u8, {}, &kYes);
  h5::close(std::move(impl_->file));
  impl_->target.commit();
  impl_->committed = true;
}

}  // namespace m2n
