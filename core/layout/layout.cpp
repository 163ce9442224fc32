// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/layout/layout.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

/// Global indices along one dimension, in local order: runs of neighbours.
using IndexList = std::vector<Interval>;

Index length(const IndexList& list) {
  Index sum = 0;
  for (const Interval& run : list) {
    sum += run.size();
  }
  return sum;
}

void append(IndexList& list, Interval run) {
  if (run.empty()) {
    return;
  }
  if (!list.empty() && list.back().end == run.begin) {
    list.back().end = run.end;
  } else {
    list.push_back(run);
  }
}

/// Appends the entries [part.begin, part.end) of @p list, by position.
void append_positions(IndexList& out, const IndexList& list, Interval part) {
  Index at = 0;
  for (const Interval& run : list) {
    const Interval here = intersect(part, {at, at + run.size()});
    if (!here.empty()) {
      append(out, {run.begin + here.begin - at, run.begin + here.end - at});
    }
    at += run.size();
  }
}

IndexList apply(const IndexList& list, const Placement& placement, Index count, Index index) {
  IndexList out;
  const Index all = length(list);
  if (placement.kind == Placement::Kind::shard) {
    append_positions(out, list, chunk(all, count, index));
    return out;
  }
  // Cut into split_factor parts, and take this rank's chunk of each. Parts past the end are empty.
  const Index part_size = ceil_div(all, placement.split_factor);
  for (Index begin = 0; begin < all; begin += part_size) {
    const Index size = std::min(part_size, all - begin);
    const Interval mine = chunk(size, count, index);
    append_positions(out, list, {begin + mine.begin, begin + mine.end});
  }
  return out;
}

/// The index list of each dimension at one coordinate of a mesh.
std::vector<IndexList> index_lists(const Shape& shape, const Mesh& mesh,
                                   const std::vector<Placement>& placements, const Dims& at) {
  std::vector<IndexList> lists(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    append(lists[d], {0, shape[d]});
  }
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const Placement& placement = placements[axis];
    if (placement.kind != Placement::Kind::replicate) {
      IndexList& list = lists[static_cast<std::size_t>(placement.dim)];
      list = apply(list, placement, mesh.dims()[axis], at[axis]);
    }
  }
  return lists;
}

Shape lengths(const std::vector<IndexList>& lists) {
  Shape shape;
  for (const IndexList& list : lists) {
    shape.push_back(length(list));
  }
  return shape;
}

/// Calls @p visit(box, first local element) for each box of the product of @p lists, row-major.
template <class Visit>
void for_each_box(const std::vector<IndexList>& lists, const Strides& local_strides, Visit visit) {
  const std::size_t rank = lists.size();
  for (const IndexList& list : lists) {
    if (list.empty()) {
      return;
    }
  }
  std::array<std::size_t, kMaxRank> run{};
  std::array<std::vector<Index>, kMaxRank> starts;  // local position of each run
  for (std::size_t d = 0; d < rank; ++d) {
    Index at = 0;
    for (const Interval& interval : lists[d]) {
      starts[d].push_back(at);
      at += interval.size();
    }
  }
  while (true) {
    Box box{Dims::filled(rank, 0), Dims::filled(rank, 0)};
    Index offset = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      box.lo[d] = lists[d][run[d]].begin;
      box.hi[d] = lists[d][run[d]].end;
      offset += starts[d][run[d]] * local_strides[d];
    }
    visit(box, offset);
    std::size_t d = rank;
    while (d > 0 && ++run[d - 1] == lists[d - 1].size()) {
      run[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

void append_number(std::string& out, Index value) { out += std::to_string(value); }

template <class Values>
void append_list(std::string& out, const Values& values) {
  out += '[';
  const char* separator = "";
  for (const auto& value : values) {
    out += separator;
    append_number(out, static_cast<Index>(value));
    separator = ",";
  }
  out += ']';
}

void append_piece(std::string& out, const Piece& piece) {
  out += "{\"box\":[";
  for (std::size_t d = 0; d < piece.box.rank(); ++d) {
    out += d == 0 ? "[" : ",[";
    append_number(out, piece.box.lo[d]);
    out += ',';
    append_number(out, piece.box.hi[d]);
    out += ']';
  }
  out += "],\"offset_bytes\":" + std::to_string(piece.view.offset_bytes) +
         ",\"slot\":" + std::to_string(piece.view.buffer) + ",\"strides\":";
  append_list(out, piece.view.strides);
  out += '}';
}

class Fingerprint {
 public:
  void add(std::uint64_t word) noexcept { state_ = mix64(state_ ^ (word + 0x9e3779b97f4a7c15ULL)); }
  void add(const Dims& dims) noexcept {
    add(dims.size());
    for (const Index value : dims) {
      add(static_cast<std::uint64_t>(value));
    }
  }
  std::uint64_t value() const noexcept { return state_; }

 private:
  std::uint64_t state_ = 0;
};

std::vector<Rank> sorted_ranks(std::vector<Rank> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

Layout Layout::sharded(const Shape& shape, DType dtype, const Mesh& mesh,
                       const std::vector<Placement>& placements) {
  element_count(shape);
  if (placements.size() != mesh.dims().size()) {
    throw Error(Errc::bad_argument, "mesh " + to_string(mesh.dims()) + " has " +
                                        std::to_string(mesh.dims().size()) + " axes but " +
                                        std::to_string(placements.size()) +
                                        " placements; there must be one an axis");
  }
  for (const Placement& placement : placements) {
    if (placement.kind != Placement::Kind::replicate &&
        (placement.dim < 0 || static_cast<std::size_t>(placement.dim) >= shape.size())) {
      throw Error(Errc::bad_argument, "placement " + to_string(placement) + " shards dimension " +
                                          std::to_string(placement.dim) + " of a tensor of shape " +
                                          to_string(shape));
    }
    expects(placement.split_factor >= 1, "a split factor of at least 1");
  }
  Layout layout(shape, dtype);
  layout.mesh_.push_back({mesh, placements});
  layout.ranks_ = sorted_ranks(mesh.ranks());
  const std::uint64_t item_bytes = bytes_of(dtype);
  for (std::size_t position = 0; position < mesh.size(); ++position) {
    const std::vector<IndexList> lists =
        index_lists(shape, mesh, placements, mesh.coordinate(position));
    const Strides strides = row_major(lengths(lists));
    for_each_box(lists, strides, [&](const Box& box, Index offset) {
      const auto offset_bytes =
          checked_mul_bytes(static_cast<std::uint64_t>(offset), item_bytes, "offset in a shard");
      layout.pieces_.push_back({mesh.ranks()[position], {box, {0, offset_bytes, strides}}});
    });
  }
  layout.finish();
  return layout;
}

Layout Layout::flat(const Shape& shape, DType dtype, Index begin, Index flat_elements,
                    const std::vector<Rank>& ranks) {
  const Index elements = element_count(shape);
  expects(begin >= 0 && flat_elements >= 0 && elements <= flat_elements - begin,
          "a tensor that lies inside its flat buffer");
  // A mesh of one axis checks the ranks: at least one, none negative, none twice.
  const Mesh mesh({static_cast<Index>(ranks.size())}, ranks);
  Layout layout(shape, dtype);
  layout.flat_ = true;
  layout.ranks_ = sorted_ranks(ranks);
  const std::uint64_t item_bytes = bytes_of(dtype);
  const Strides strides = row_major(shape);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Interval part =
        chunk(flat_elements, static_cast<Index>(ranks.size()), static_cast<Index>(i));
    const Interval mine = intersect(part, {begin, begin + elements});
    if (mine.empty()) {
      continue;
    }
    Index at = mine.begin - part.begin;
    for (const Box& box : boxes_of_flat_range(shape, {mine.begin - begin, mine.end - begin})) {
      layout.pieces_.push_back(
          {ranks[i], {box, {0, static_cast<std::uint64_t>(at) * item_bytes, strides}}});
      at += box.volume();
    }
  }
  layout.finish();
  return layout;
}

Layout Layout::explicit_pieces(const Shape& shape, DType dtype, std::vector<Rank> ranks,
                               std::vector<RankPiece> pieces) {
  element_count(shape);
  Layout layout(shape, dtype);
  for (const RankPiece& entry : pieces) {
    ranks.push_back(entry.rank);
    const Piece& piece = entry.piece;
    const auto wrong = [&](const std::string& what) {
      return Error(Errc::bad_argument, "rank " + std::to_string(entry.rank) + " piece " +
                                           to_string(piece.box) + " " + what);
    };
    if (piece.box.lo.size() != shape.size() || piece.box.hi.size() != shape.size()) {
      throw wrong("has another rank than the tensor, whose shape is " + to_string(shape));
    }
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (piece.box.lo[d] < 0 || piece.box.lo[d] > piece.box.hi[d] || piece.box.hi[d] > shape[d]) {
        throw wrong("leaves the tensor, whose shape is " + to_string(shape));
      }
    }
    if (piece.view.strides.size() != shape.size()) {
      throw wrong("has " + std::to_string(piece.view.strides.size()) +
                  " strides; there must be one a dimension");
    }
    byte_span(piece.box.extents(), piece.view, bytes_of(dtype));
  }
  std::erase_if(pieces, [](const RankPiece& entry) { return entry.piece.box.empty(); });
  layout.ranks_ = sorted_ranks(std::move(ranks));
  if (!layout.ranks_.empty() && layout.ranks_.front() < 0) {
    throw Error(Errc::bad_argument, "rank " + std::to_string(layout.ranks_.front()) +
                                        " holds a piece; ranks start at 0");
  }
  layout.pieces_ = std::move(pieces);
  layout.finish();
  return layout;
}

void Layout::finish() {
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const RankPiece& a, const RankPiece& b) { return a.rank < b.rank; });
  Fingerprint print;
  print.add(shape_);
  print.add(static_cast<std::uint64_t>(dtype_));
  print.add(flat_ ? 1 : 0);
  print.add(ranks_.size());
  for (const Rank rank : ranks_) {
    print.add(static_cast<std::uint64_t>(rank));
  }
  piece_ranks_.clear();
  piece_ranks_.reserve(pieces_.size());
  for (const RankPiece& entry : pieces_) {
    piece_ranks_.push_back(entry.rank);
    print.add(static_cast<std::uint64_t>(entry.rank));
    print.add(entry.piece.box.lo);
    print.add(entry.piece.box.hi);
    print.add(entry.piece.view.buffer);
    print.add(entry.piece.view.offset_bytes);
    print.add(entry.piece.view.strides);
    slot_count_ = std::max(slot_count_, entry.piece.view.buffer + 1);
  }
  fingerprint_ = print.value();
}

std::span<const RankPiece> Layout::pieces_of(Rank rank) const {
  const auto [first, last] =
      std::equal_range(pieces_.begin(), pieces_.end(), RankPiece{rank, {}},
                       [](const RankPiece& a, const RankPiece& b) { return a.rank < b.rank; });
  return {first, last};
}

CompactShard Layout::compact(Rank rank) const {
  CompactShard shard;
  const std::span<const RankPiece> held = pieces_of(rank);
  for (const RankPiece& entry : held) {
    shard.pieces.push_back(entry.piece);
  }
  if (!mesh_.empty()) {
    const auto& ranks = mesh_.front().mesh.ranks();
    const auto at = std::find(ranks.begin(), ranks.end(), rank);
    if (at != ranks.end()) {
      const auto position = static_cast<std::size_t>(at - ranks.begin());
      shard.local_shape = lengths(index_lists(shape_, mesh_.front().mesh, mesh_.front().placements,
                                              mesh_.front().mesh.coordinate(position)));
      return shard;
    }
  }
  if (held.empty()) {
    shard.local_shape = shape_.empty() ? Shape{0} : shape_;
    shard.local_shape[0] = 0;
    return shard;
  }

  const std::uint64_t item_bytes = bytes_of(dtype_);
  // A grid: per dimension disjoint intervals, and every combination of them exactly once.
  std::vector<IndexList> lists(shape_.size());
  bool grid = !flat_;
  std::size_t cells = 1;
  for (std::size_t d = 0; d < shape_.size() && grid; ++d) {
    IndexList& list = lists[d];
    for (const Piece& piece : shard.pieces) {
      list.push_back(piece.box[d]);
    }
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    for (std::size_t i = 1; i < list.size(); ++i) {
      grid = grid && list[i - 1].end <= list[i].begin;
    }
    cells *= list.size();
    grid = grid && cells <= shard.pieces.size();
  }
  if (grid && cells == shard.pieces.size()) {
    std::vector<Box> boxes;
    for (const Piece& piece : shard.pieces) {
      boxes.push_back(piece.box);
    }
    std::sort(boxes.begin(), boxes.end());
    grid = std::adjacent_find(boxes.begin(), boxes.end()) == boxes.end();
  } else {
    grid = false;
  }
  if (grid) {
    shard.local_shape = lengths(lists);
    const Strides strides = row_major(shard.local_shape);
    shard.pieces.clear();
    for_each_box(lists, strides, [&](const Box& box, Index offset) {
      shard.pieces.push_back({box, {0, static_cast<std::uint64_t>(offset) * item_bytes, strides}});
    });
    return shard;
  }
  Index at = 0;
  for (Piece& piece : shard.pieces) {
    // A contiguous part of a flat tensor keeps the tensor's strides; any other box is packed.
    const Strides strides = flat_ ? row_major(shape_) : row_major(piece.box.extents());
    piece.view = {0, static_cast<std::uint64_t>(at) * item_bytes, strides};
    at = checked_add(at, piece.box.volume());
  }
  shard.local_shape = {at};
  return shard;
}

std::string Layout::canonical_json() const {
  std::string out = "{\"dtype\":\"" + std::string(to_string(dtype_)) + "\"";
  if (!mesh_.empty()) {
    const MeshForm& form = mesh_.front();
    out += ",\"mesh\":{\"dims\":";
    append_list(out, form.mesh.dims());
    if (const auto start = form.mesh.contiguous_start()) {
      out += ",\"start\":" + std::to_string(*start);
    } else {
      out += ",\"ranks\":";
      append_list(out, form.mesh.ranks());
    }
    out += "},\"placements\":[";
    const char* separator = "\"";
    for (const Placement& placement : form.placements) {
      out += separator + to_string(placement) + '"';
      separator = ",\"";
    }
    out += "]";
  } else {
    if (flat_) {
      out += ",\"flat\":true";
    }
    out += ",\"pieces\":{";
    const char* separator = "\"";
    std::vector<std::pair<std::string, Rank>> by_name;  // keys sorted as text
    for (const Rank rank : ranks_) {
      by_name.emplace_back(std::to_string(rank), rank);
    }
    std::sort(by_name.begin(), by_name.end());
    for (const auto& [name, rank] : by_name) {
      out += separator + name + "\":[";
      bool first = true;
      for (const RankPiece& entry : pieces_of(rank)) {
        out += first ? "" : ",";
        append_piece(out, entry.piece);
        first = false;
      }
      out += ']';
      separator = ",\"";
    }
    out += '}';
  }
  out += ",\"shape\":";
  append_list(out, shape_);
  return out + '}';
}

bool operator==(const Layout& a, const Layout& b) {
  return a.fingerprint_ == b.fingerprint_ && a.shape_ == b.shape_ && a.dtype_ == b.dtype_ &&
         a.flat_ == b.flat_ && a.ranks_ == b.ranks_ && a.pieces_ == b.pieces_ && a.mesh_ == b.mesh_;
}

std::shared_ptr<const Layout> LayoutTable::intern(Layout layout) {
  auto& candidates = by_fingerprint_[layout.fingerprint()];
  for (const auto& candidate : candidates) {
    if (*candidate == layout) {
      return candidate;
    }
  }
  candidates.push_back(std::make_shared<const Layout>(std::move(layout)));
  ++count_;
  return candidates.back();
}

FlatUnit flat_unit(const std::vector<Shape>& shapes, Index align_elements, std::size_t ranks) {
  expects(align_elements >= 0, "an alignment of 0 or more elements");
  expects(ranks > 0, "at least one rank in an FSDP1 unit");
  const auto pad_to = [](Index total, Index multiple) {
    return checked_add(total, (multiple - total % multiple) % multiple, "flat element count");
  };
  FlatUnit unit;
  for (const Shape& shape : shapes) {
    if (align_elements > 0) {
      unit.elements = pad_to(unit.elements, align_elements);
    }
    unit.members.push_back({shape, unit.elements});
    unit.elements = checked_add(unit.elements, element_count(shape), "flat element count");
  }
  if (align_elements > 0) {
    unit.elements = pad_to(unit.elements, static_cast<Index>(ranks));
  }
  return unit;
}

std::string sha256_hex(std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned int size = 0;
  if (EVP_Digest(text.data(), text.size(), hash.data(), &size, EVP_sha256(), nullptr) != 1) {
    throw Error(Errc::unavailable, "SHA-256 is not available in this libcrypto");
  }
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (unsigned int i = 0; i < size; ++i) {
    out += kDigits[hash[i] >> 4];
    out += kDigits[hash[i] & 15];
  }
  return out;
}

}  // namespace m2n
