// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/layout/layout_json.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "core/layout/layout.hpp"

namespace m2n {
namespace layout_json {

Dims dims(const JsonReader& value) {
  Dims out;
  for (const JsonReader& entry : value.items()) {
    if (out.size() == kMaxRank) {
      value.fail("has more than " + std::to_string(kMaxRank) + " numbers");
    }
    out.push_back(entry.integer());
  }
  return out;
}

Shape shape(const JsonReader& value) {
  const Shape out = dims(value);
  for (const Index extent : out) {
    if (extent < 0) {
      value.fail("has a negative extent; extents are 0 or more");
    }
  }
  return out;
}

Rank rank(const JsonReader& value) { return value.integer_in<Rank>(); }

std::vector<Rank> ranks(const JsonReader& value) {
  std::vector<Rank> out;
  for (const JsonReader& entry : value.items()) {
    out.push_back(rank(entry));
  }
  return out;
}

Mesh mesh(const JsonReader& value) {
  value.allow_keys({"dims", "start", "ranks"});
  const Dims axes = dims(value.at("dims"));
  const auto start = value.find("start");
  const auto list = value.find("ranks");
  if (start.has_value() == list.has_value()) {
    value.fail("needs either 'start' or 'ranks'");
  }
  return start ? Mesh(axes, rank(*start)) : Mesh(axes, ranks(*list));
}

std::vector<Placement> placements(const JsonReader& value, std::size_t tensor_rank) {
  std::vector<Placement> out;
  for (const JsonReader& entry : value.items()) {
    out.push_back(placement_from_string(entry.string(), tensor_rank));
  }
  return out;
}

Box box(const JsonReader& value) {
  Box out;
  for (const JsonReader& range : value.items()) {
    const std::vector<JsonReader> ends = range.items();
    if (ends.size() != 2 || out.rank() == kMaxRank) {
      range.fail("must be [begin, end], one a dimension of the tensor");
    }
    out.lo.push_back(ends[0].integer());
    out.hi.push_back(ends[1].integer());
  }
  return out;
}

Rank rank_of_key(const JsonReader& object, const std::string& key) {
  Rank out = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), out);
  if (error != std::errc{} || end != key.data() + key.size() || out < 0) {
    object.fail("has the key '" + key + "'; keys are ranks");
  }
  return out;
}

}  // namespace layout_json

namespace {

/// Pieces that say of themselves that they are slices of one flat buffer must be: the promises of
/// covers_by_design() and compact_by_design() depend on it.
void require_flat(const Shape& shape, DType dtype, const std::vector<RankPiece>& pieces,
                  const JsonReader& value) {
  const Strides strides = row_major(shape);
  const std::uint64_t item_bytes = bytes_of(dtype);
  std::map<Rank, std::vector<Piece>> by_rank;
  for (const RankPiece& entry : pieces) {
    by_rank[entry.rank].push_back(entry.piece);
  }
  std::vector<Interval> held;
  for (const auto& [rank, own] : by_rank) {
    Index begin = 0;
    Index size = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      begin += own.front().box.lo[d] * strides[d];
    }
    for (const Piece& piece : own) {
      size = checked_add(size, piece.box.volume());
    }
    const Interval range{begin, checked_add(begin, size)};
    bool flat = range.end <= element_count(shape);
    const std::vector<Box> boxes =
        flat ? boxes_of_flat_range(shape, range) : std::vector<Box>(own.size());
    flat = flat && boxes.size() == own.size();
    std::uint64_t offset_bytes = own.front().view.offset_bytes;
    for (std::size_t i = 0; i < own.size() && flat; ++i) {
      flat = own[i].box == boxes[i] && own[i].view.strides == strides && own[i].view.buffer == 0 &&
             own[i].view.offset_bytes == offset_bytes;
      offset_bytes = checked_add_bytes(offset_bytes,
                                       static_cast<std::uint64_t>(boxes[i].volume()) * item_bytes);
    }
    if (!flat) {
      value.fail("says that it is flat, but the pieces of rank " + std::to_string(rank) +
                 " are no contiguous part of one flat buffer");
    }
    held.push_back(range);
  }
  std::sort(held.begin(), held.end());
  Index next = 0;
  for (const Interval& range : held) {
    if (range.begin != next) {
      break;
    }
    next = range.end;
  }
  if (next != element_count(shape) || (!held.empty() && held.back().end != next)) {
    value.fail("says that it is flat, but its ranks do not hold every element once");
  }
}

}  // namespace

Layout Layout::from_json(std::string_view json, const std::string& where) {
  const boost::json::value document = parse_json(json, where);
  const JsonReader root(document, where);
  return root.context<Layout>([](const JsonReader& value) {
    const Shape shape = layout_json::shape(value.at("shape"));
    const DType dtype = value.at("dtype").context<DType>(
        [](const JsonReader& word) { return dtype_from_string(word.string()); });
    if (const auto mesh = value.find("mesh")) {
      value.allow_keys({"dtype", "mesh", "placements", "shape"});
      return sharded(shape, dtype, layout_json::mesh(*mesh),
                     layout_json::placements(value.at("placements"), shape.size()));
    }
    value.allow_keys({"dtype", "flat", "pieces", "shape"});
    std::vector<Rank> ranks;
    std::vector<RankPiece> pieces;
    for (const auto& [key, list] : value.at("pieces").members()) {
      ranks.push_back(layout_json::rank_of_key(value, key));
      for (const JsonReader& entry : list.items()) {
        entry.allow_keys({"box", "offset_bytes", "slot", "strides"});
        Piece piece{layout_json::box(entry.at("box")), {}};
        piece.view.buffer = entry.at("slot").integer_in<std::uint32_t>();
        piece.view.offset_bytes = entry.at("offset_bytes").integer_in<std::uint64_t>();
        piece.view.strides = layout_json::dims(entry.at("strides"));
        pieces.push_back({ranks.back(), piece});
      }
    }
    Layout layout = explicit_pieces(shape, dtype, std::move(ranks), std::move(pieces));
    if (const auto flat = value.find("flat"); flat && flat->boolean()) {
      require_flat(shape, dtype, layout.pieces_, value);
      layout.flat_ = true;
      layout.finish();
    }
    return layout;
  });
}

}  // namespace m2n
