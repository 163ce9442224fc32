// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// From the columns of a dump back to the problem and the plan that it was made of.

#include <algorithm>
#include <boost/json.hpp>
#include <span>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"
#include "core/io/dump_reader_impl.hpp"
#include "core/io/json_reader.hpp"
#include "core/plan/plan_builder.hpp"

namespace m2n {
namespace {

/// Columns of one dump, each compared with its checksum.
class Columns {
 public:
  explicit Columns(const DumpReader& dump) : dump_(dump) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Errc::io, "'" + dump_.file().string() + "' " + what);
  }

  /// @param rows  How many there must be; nothing for any number.
  template <class Value>
  std::vector<Value> values(const std::string& path, std::optional<std::size_t> rows = {},
                            std::size_t width = 1) const {
    dump_.verify(path);
    std::vector<Value> out = dump_.column<Value>(path);
    expect_rows(path, out.size() / width, rows);
    return out;
  }

  /// [rows, width] positions.
  std::vector<Index> positions(const std::string& path, std::size_t rows, std::size_t width) const {
    return values<Index>(path, rows, width);
  }

  void expect_rows(const std::string& path, std::size_t found,
                   std::optional<std::size_t> rows) const {
    if (rows && found != *rows) {
      fail("has " + std::to_string(found) + " rows in '" + path + "', not " +
           std::to_string(*rows));
    }
  }

 private:
  const DumpReader& dump_;
};

Dims unpadded(const std::vector<Index>& all, std::size_t row, std::size_t width, std::size_t rank) {
  return Dims(std::span<const Index>(all.data() + row * width, rank));
}

std::vector<std::string> list_of(const std::string& json, const std::string& where) {
  const boost::json::value document = parse_json(json, where);
  std::vector<std::string> out;
  for (const JsonReader& item : JsonReader(document, where).items()) {
    out.emplace_back(item.string());
  }
  return out;
}

std::vector<std::shared_ptr<const Layout>> read_layouts(const DumpReader& dump,
                                                        const Columns& columns,
                                                        const std::string& json) {
  const auto begin = columns.values<std::uint64_t>("/layouts/begin");
  const auto end = columns.values<std::uint64_t>("/layouts/end", begin.size());
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (std::size_t i = 0; i < begin.size(); ++i) {
    if (begin[i] > end[i] || end[i] > json.size()) {
      columns.fail("has a layout outside of '/layouts/json'");
    }
    layouts.push_back(std::make_shared<const Layout>(
        Layout::from_json(std::string_view(json).substr(begin[i], end[i] - begin[i]),
                          "layout " + std::to_string(i) + " of '" + dump.file().string() + "'")));
  }
  return layouts;
}

/// Where pattern after pattern takes its part of a column.
struct Cursor {
  std::size_t next = 0;

  /// @return the first of @p count rows. @throws Error{io} when there are fewer in all.
  std::size_t take(std::uint64_t count, std::size_t rows, const Columns& columns) {
    const std::size_t first = next;
    if (count > rows - first) {
      columns.fail("has fewer rows in '/plan/patterns' than its patterns count");
    }
    next += count;
    return first;
  }
};

}  // namespace

Problem DumpReader::problem() const {
  const h5::Lock lock;
  const Columns columns(*this);
  if (!has("/params/name") || !has("/layouts/json")) {
    columns.fail("has no problem: it was dumped without /params or /layouts");
  }
  const auto texts = [&](const std::string& path) {
    verify(path);
    return h5::read_texts(impl_->file, path);
  };
  const std::vector<std::string> json = texts("/layouts/json");
  const auto layouts = read_layouts(*this, columns, json.empty() ? std::string() : json.front());

  // Trailing NULs of a name are lost in padding, but not in its escaped path.
  const std::vector<std::string> paths = texts("/params/path");
  const std::size_t rows = paths.size();
  const auto cast = columns.values<std::uint8_t>("/params/cast", rows);
  std::vector<Parameter> parameters(rows);
  for (const bool of_source : {true, false}) {
    const std::string side = of_source ? "source" : "destination";
    const auto numbers = columns.values<std::uint32_t>("/params/" + side + "_layout", rows);
    const auto buffers = texts("/params/" + side + "_buffers");
    columns.expect_rows("/params/" + side + "_buffers", buffers.size(), rows);
    for (std::size_t i = 0; i < rows; ++i) {
      if (numbers[i] >= layouts.size()) {
        columns.fail("has no layout " + std::to_string(numbers[i]) + ", which parameter " +
                     std::to_string(i) + " names");
      }
      Side& out = of_source ? parameters[i].source : parameters[i].destination;
      out.layout = layouts[numbers[i]];
      out.buffers =
          list_of(buffers[i], "'/params/" + side + "_buffers' of '" + impl_->path.string() + "'");
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    parameters[i].name = name_of_dump_path(paths[i]);
    parameters[i].shape = parameters[i].source.layout->shape();
    parameters[i].cast = cast[i] != 0;
  }
  if (has("/params/scales")) {
    const auto scales = columns.values<std::int64_t>("/params/scales", rows);
    const auto blocks = columns.positions("/params/blocks", rows, kMaxRank);
    for (std::size_t i = 0; i < rows; ++i) {
      if (scales[i] < 0) {
        continue;
      }
      if (std::cmp_greater_equal(scales[i], rows)) {
        columns.fail("has no parameter " + std::to_string(scales[i]) +
                     ", which holds the scales of " + std::to_string(i));
      }
      parameters[i].quantise = Quantise{unpadded(blocks, i, kMaxRank, parameters[i].shape.size()),
                                        parameters[static_cast<std::size_t>(scales[i])].name};
    }
  }
  Problem problem = Problem::make(std::move(parameters));
  LayoutNumbers numbers;
  const std::string digest = problem_digest(problem, numbers);
  if (fact("problem_digest") != digest) {
    columns.fail("holds the problem " + digest + ", but says that it is " +
                 fact("problem_digest").value_or("none"));
  }
  return problem;
}

Plan DumpReader::plan(const Problem& problem) const {
  const h5::Lock lock;
  const Columns columns(*this);
  const std::string root = "/plan/patterns";
  if (!has(root + "/planner")) {
    columns.fail(impl_->schema_version < 2 && has("/plan/bytes")
                     ? "is of schema version 1, whose plans can be looked at but not run again"
                     : "has no plan");
  }
  const auto dataset_of = [&](const std::string& path) {
    return h5::open_dataset(impl_->file, path);
  };
  const h5::Dataset box_rows = dataset_of(root + "/boxes/lo");
  const std::size_t width =
      box_rows.shape.size() == 2 ? static_cast<std::size_t>(box_rows.shape[1]) : 0;
  if (width == 0 || width > kMaxRank) {
    columns.fail("has boxes of " + std::to_string(width) + " dimensions in '/plan/patterns'");
  }
  const auto source = columns.values<std::uint32_t>(root + "/source_layout");
  const std::size_t count = source.size();
  const auto destination = columns.values<std::uint32_t>(root + "/destination_layout", count);
  const auto box_count = columns.values<std::uint64_t>(root + "/box_count", count);
  const auto move_count = columns.values<std::uint64_t>(root + "/move_count", count);
  const auto scratch_count = columns.values<std::uint64_t>(root + "/scratch_count", count);
  const auto boxes = static_cast<std::size_t>(box_rows.shape[0]);
  const auto box_lo = columns.positions(root + "/boxes/lo", boxes, width);
  const auto box_hi = columns.positions(root + "/boxes/hi", boxes, width);
  const auto box = columns.values<std::uint32_t>(root + "/moves/box");
  const std::size_t moves = box.size();
  const auto from = columns.values<std::uint32_t>(root + "/moves/from", moves);
  const auto to = columns.values<std::uint32_t>(root + "/moves/to", moves);
  const auto stage = columns.values<std::uint32_t>(root + "/moves/stage", moves);
  const auto rank = columns.values<std::int32_t>(root + "/scratch/rank");
  const std::size_t scratches = rank.size();
  const auto scratch_lo = columns.positions(root + "/scratch/lo", scratches, width);
  const auto scratch_hi = columns.positions(root + "/scratch/hi", scratches, width);
  const auto offset_bytes =
      columns.values<std::uint64_t>(root + "/scratch/offset_bytes", scratches);

  LayoutNumbers numbers;
  problem_digest(problem, numbers);
  std::map<std::uint32_t, std::shared_ptr<const Layout>> layouts;
  for (const Parameter& parameter : problem.parameters()) {
    for (const Side* side : {&parameter.source, &parameter.destination}) {
      layouts.emplace(numbers.number_of(*side->layout), side->layout);
    }
  }
  const auto planner = h5::read_texts(impl_->file, root + "/planner");
  PlanBuilder builder(problem, planner.empty() ? std::string() : planner.front());
  Cursor next_box;
  Cursor next_move;
  Cursor next_scratch;
  for (std::size_t p = 0; p < count; ++p) {
    if (!layouts.contains(source[p]) || !layouts.contains(destination[p])) {
      columns.fail("has a pattern of a layout that no parameter has");
    }
    Pattern pattern;
    pattern.geometry = {layouts[source[p]], layouts[destination[p]]};
    const std::size_t dims = pattern.geometry.source->shape().size();
    if (dims > width || pattern.geometry.destination->shape().size() != dims) {
      columns.fail("has a pattern between tensors of different rank");
    }
    const auto box_at = [&](const auto& lo, const auto& hi, std::size_t row) {
      return Box{unpadded(lo, row, width, dims), unpadded(hi, row, width, dims)};
    };
    const Box whole = Box::whole(pattern.geometry.source->shape());
    for (std::size_t i = next_box.take(box_count[p], boxes, columns); i < next_box.next; ++i) {
      pattern.boxes.push_back(box_at(box_lo, box_hi, i));
    }
    for (std::size_t i = next_scratch.take(scratch_count[p], scratches, columns);
         i < next_scratch.next; ++i) {
      pattern.scratch.push_back({rank[i], box_at(scratch_lo, scratch_hi, i), offset_bytes[i]});
      if (rank[i] < 0 || rank[i] >= problem.world_size()) {
        columns.fail("has scratch memory on rank " + std::to_string(rank[i]));
      }
    }
    for (const Box& one : pattern.boxes) {
      if (!whole.contains(one)) {
        columns.fail("moves the box " + to_string(one) + ", which is not inside the shape " +
                     to_string(pattern.geometry.source->shape()));
      }
    }
    const std::size_t holdings = std::size_t{pattern.geometry.source_count()} +
                                 pattern.geometry.destination_count() + pattern.scratch.size();
    for (std::size_t i = next_move.take(move_count[p], moves, columns); i < next_move.next; ++i) {
      if (box[i] >= pattern.boxes.size() || from[i] >= holdings || to[i] >= holdings) {
        columns.fail("has a move in '/plan/patterns' of a box or a holding that does not exist");
      }
      pattern.moves.push_back({box[i], from[i], to[i], stage[i]});
    }
    builder.add(std::move(pattern));
  }
  const std::size_t parameters = problem.parameters().size();
  const auto of_parameter = columns.values<std::uint32_t>(root + "/of_parameter", parameters);
  const auto first_stage = columns.values<std::uint32_t>(root + "/first_stage", parameters);
  for (std::uint32_t i = 0; i < parameters; ++i) {
    if (of_parameter[i] >= count) {
      columns.fail("has no pattern " + std::to_string(of_parameter[i]) + ", which parameter " +
                   std::to_string(i) + " follows");
    }
    builder.assign(i, of_parameter[i], first_stage[i]);
  }
  Plan plan = std::move(builder).finish();
  if (fact("plan_digest") != plan.digest) {
    columns.fail("holds the plan " + plan.digest + ", but says that it is " +
                 fact("plan_digest").value_or("none"));
  }
  return plan;
}

std::vector<DumpDigest> DumpReader::digests() const {
  const h5::Lock lock;
  std::vector<DumpDigest> out;
  if (!has("/digests/digest")) {
    return out;
  }
  const Columns columns(*this);
  const auto digest = columns.values<std::uint64_t>("/digests/digest");
  const auto side = columns.values<std::uint8_t>("/digests/side", digest.size());
  const auto rank = columns.values<std::int32_t>("/digests/rank", digest.size());
  const auto parameter = columns.values<std::uint32_t>("/digests/parameter", digest.size());
  for (std::size_t i = 0; i < digest.size(); ++i) {
    if (side[i] > 1) {
      columns.fail("has a digest of a side that is none");
    }
    out.push_back({static_cast<Role>(side[i]), rank[i], parameter[i], digest[i]});
  }
  return out;
}

}  // namespace m2n
