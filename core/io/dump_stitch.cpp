// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <span>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"

namespace m2n {
namespace {

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
void map_shard(const StoredShard& stored, std::uint64_t item_bytes, std::vector<h5::Mapping>& out) {
  const CompactShard& shard = stored.geometry;
  const std::size_t rank = shard.local_shape.size();
  if (const auto grid = grid_of(shard, item_bytes)) {
    std::vector<std::vector<RegularRun>> runs;
    for (const std::vector<Interval>& intervals : *grid) {
      runs.push_back(regular_runs(intervals));
    }
    std::vector<std::size_t> at(rank, 0);
    for (;;) {
      h5::Mapping mapping{stored.file, stored.path, shard.local_shape, {}, {}, {}, {}, {}};
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
      throw Error(Errc::bad_argument, "shard '" + stored.path + "' cannot be stitched: box " +
                                          to_string(piece.box) +
                                          " is neither part of a grid nor contiguous in it");
    }
    const Shape extents = piece.box.extents();
    const auto start = static_cast<Index>(piece.view.offset_bytes / item_bytes);
    out.push_back({stored.file,
                   stored.path,
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
    const StoredShard* holder = nullptr;  // of the whole tensor
    for (const StoredShard& one : stored.shards) {
      const CompactShard& shard = one.geometry;
      if (shard.local_shape == stored.shape &&
          (empty || (shard.pieces.size() == 1 && shard.pieces.front().box == whole))) {
        holder = &one;
        break;
      }
      bool is_new = false;
      for (const Piece& piece : shard.pieces) {
        is_new = boxes.insert(piece.box).second || is_new;
      }
      if (is_new) {  // otherwise a replica
        map_shard(one, bytes_of(stored.dtype), mappings);
      }
    }
    if (holder != nullptr) {
      if (holder->file.empty()) {
        h5::link(impl_->file, holder->path, path);
      } else {
        h5::link_external(impl_->file, holder->file, holder->path, path);
      }
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

}  // namespace m2n
