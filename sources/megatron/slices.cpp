// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/megatron/slices.hpp"

#include <string>
#include <utility>

#include "sources/sharded_source.hpp"

namespace m2n::sources::megatron {
namespace {

/// A run of rows of a fused parameter, and the rows of one member that it holds.
struct Run {
  Index fused = 0;
  Index member = 0;
  Index rows = 0;
};

/// For each group: its query heads, its key, its value.
std::vector<Run> runs_of(const Attention& attention, Kind member, Index member_begin) {
  const Index queries = attention.heads / attention.groups * attention.head_dim;
  const Index stride = queries + 2 * attention.head_dim;
  const Index length = member == Kind::query ? queries : attention.head_dim;
  const Index skip = member == Kind::query ? 0
                     : member == Kind::key ? queries
                                           : queries + attention.head_dim;
  std::vector<Run> runs;
  for (Index group = 0; group < attention.groups; ++group) {
    runs.push_back({group * stride + skip, member_begin + group * length, length});
  }
  return runs;
}

Interval even(Index extent, const Part& part) {
  return {extent / part.parts * part.part, extent / part.parts * (part.part + 1)};
}

/// Rows of a member of linear_qkv on one rank: local row of the fused parameter, member's rows.
std::vector<std::pair<Index, Interval>> own_rows(const Attention& attention, Kind member,
                                                 Index member_begin, const Part& part) {
  const Interval own = even(attention.rows(), part);
  std::vector<std::pair<Index, Interval>> rows;
  for (const Run& run : runs_of(attention, member, member_begin)) {
    const Interval common = intersect(own, {run.fused, run.fused + run.rows});
    if (!common.empty()) {
      const Index shift = run.member - run.fused;
      rows.push_back({common.begin - own.begin, {common.begin + shift, common.end + shift}});
    }
  }
  return rows;
}

Index width(const TensorInfo& tensor) { return tensor.shape.size() == 2 ? tensor.shape[1] : 1; }

void require_rank(const TensorInfo& tensor, std::size_t least, std::size_t most) {
  if (tensor.shape.size() < least || tensor.shape.size() > most) {
    refuse_tensor(tensor, "expected " + std::to_string(least) +
                              (least == most ? "" : " or " + std::to_string(most)) +
                              (most == 1 ? " dimension" : " dimensions") + " for this layer kind");
  }
}

bool of_linear_qkv(Kind kind) {
  return kind == Kind::query || kind == Kind::key || kind == Kind::value;
}

/// The dimension that is cut, of a kind that cuts one into even parts.
std::optional<std::size_t> cut_dimension(const TensorInfo& tensor, Kind kind) {
  switch (kind) {
    case Kind::column:
    case Kind::gate:
    case Kind::up:
    case Kind::conv_row:
      return 0;
    case Kind::row:
    case Kind::stacked_rows:
    case Kind::stacked_conv_columns:
      return 1;
    case Kind::stacked_columns:
    case Kind::stacked_conv_rows:
      return 2;
    case Kind::conv_column:
      return tensor.shape.size() - 1;
    default:
      return std::nullopt;
  }
}

/// Pieces of one tensor.
class Pieces {
 public:
  explicit Pieces(const TensorInfo& tensor) : tensor_(tensor) {}

  Box slice(std::size_t d, Interval range) const {
    Box box = Box::whole(tensor_.shape);
    box.lo[d] = range.begin;
    box.hi[d] = range.end;
    return box;
  }

  void add(const Box& box, Index offset, const Strides& strides) {
    if (!box.empty()) {
      const std::uint64_t item = bytes_of(tensor_.dtype);
      out.push_back(
          {box, {0, checked_mul_bytes(static_cast<std::uint64_t>(offset), item), strides}});
    }
  }
  void add(const Box& box, Index offset = 0) { add(box, offset, row_major(box.extents())); }

  std::vector<Piece> out;

 private:
  const TensorInfo& tensor_;
};

/// Each expert's matrix turned round.
Strides turned(const Shape& extents) { return {extents[1] * extents[2], 1, extents[1]}; }

}  // namespace

Slicer::Slicer(const OptionReader& options, Index tensor_parallel)
    : options_(options),
      tensor_parallel_(tensor_parallel),
      vocab_divisor_(options.number("vocab_divisor", 128)),
      block_(options.number("block", 128)) {
  if (options.has("heads") != options.has("head_dim") ||
      (options.has("groups") && !options.has("heads"))) {
    options.refuse("give heads and head_dim together (and groups with them)");
  }
  if (!options.has("heads")) {
    return;
  }
  Attention attention;
  attention.heads = options.number("heads", 1);
  attention.groups = options.number("groups", attention.heads);
  attention.head_dim = options.number("head_dim", 1);
  if (attention.heads % attention.groups != 0) {
    options.refuse("groups",
                   "which does not divide the " + std::to_string(attention.heads) + " heads");
  }
  (void)attention.rows();  // overflow shows here
  attention_ = attention;
}

void Slicer::require_divides(const Held& held, std::size_t d, Index parts, const char* what) const {
  const TensorInfo& extents = held.weight == nullptr ? held.tensor : *held.weight;
  if (extents.shape[d] % parts != 0) {
    refuse_tensor(held.tensor, "dimension " + std::to_string(d) +
                                   (held.weight == nullptr ? "" : " of its weight") +
                                   " does not divide by " + what + "=" + std::to_string(parts));
  }
}

Attention Slicer::attention_for(const Held& held, std::size_t d, Index parts) const {
  const TensorInfo& tensor = held.tensor;
  if (!attention_) {
    options_.refuse("parameter '" + tensor.name +
                    "' lies in linear_qkv, which needs options heads, groups and head_dim");
  }
  Attention attention = *attention_;
  const Index block = block_of(held);
  if (attention.head_dim % block != 0) {
    refuse_tensor(tensor, "heads of " + std::to_string(attention.head_dim) +
                              " rows do not fill blocks of " + std::to_string(block) +
                              ", so linear_qkv has no scales of its own order");
  }
  attention.head_dim /= block;
  if (attention.heads % parts != 0 ||
      (attention.groups % parts != 0 && parts % attention.groups != 0) ||
      attention.rows() % parts != 0) {
    refuse_tensor(
        tensor,
        std::to_string(attention.heads) + " heads in " + std::to_string(attention.groups) +
            " groups, " + std::to_string(attention.rows()) +
            " rows of linear_qkv, do not divide by tensor_parallel=" + std::to_string(parts));
  }
  const Kind kind = held.holding.kind;
  const Index rows = kind == Kind::conv_qkv ? attention.rows()
                     : kind == Kind::query  ? attention.heads * attention.head_dim
                                            : attention.groups * attention.head_dim;
  if (tensor.shape[d] != rows) {
    refuse_tensor(tensor, "heads=" + std::to_string(attention_->heads) +
                              ", groups=" + std::to_string(attention_->groups) + " and head_dim=" +
                              std::to_string(attention_->head_dim) + " ask for " +
                              std::to_string(rows) + " in dimension " + std::to_string(d));
  }
  return attention;
}

Index Slicer::padded_vocabulary(Index rows) const {
  const Index multiple = checked_mul(vocab_divisor_, tensor_parallel_);
  return checked_mul(ceil_div(rows, multiple), multiple);
}

/// What a part has of dimension @p d; of scales the blocks that it touches.
Interval Slicer::own(const Held& held, std::size_t d, const Part& part) const {
  if (held.weight == nullptr) {
    return even(held.tensor.shape[d], part);
  }
  const Interval weight = even(held.weight->shape[d], part);
  return {weight.begin / block_, ceil_div(weight.end, block_)};
}

/// A rank's own blocks count from its first row or column: they must be the checkpoint's.
void Slicer::check_scales(const Held& held, Index parts) const {
  const TensorInfo& scales = held.tensor;
  const Shape& weight = held.weight->shape;
  Shape expected = weight;
  for (Index& extent : expected) {
    extent = ceil_div(extent, block_);
  }
  if (scales.shape != expected) {
    refuse_tensor(scales, "blocks of " + std::to_string(block_) + " (option block) of its weight " +
                              to_string(weight) + " ask for scales " + to_string(expected));
  }
  const Kind kind = held.holding.kind;
  if (kind == Kind::conv_column || kind == Kind::conv_row || kind == Kind::conv_qkv) {
    refuse_tensor(scales, "weights that Megatron turns round have no scales of blocks");
  }
  const auto d = cut_dimension(scales, kind);
  if (!d || parts == 1) {
    return;
  }
  const Index share = weight[*d] / parts;
  if (share == 0) {
    return;
  }
  const bool halves = kind == Kind::gate || kind == Kind::up;
  const bool inside = block_ % share == 0 && !halves;  // several ranks inside a block
  if (share % block_ != 0 && !inside) {
    refuse_tensor(scales, "a rank's " + std::to_string(share) + " of dimension " +
                              std::to_string(*d) + " of its weight are no multiple of blocks of " +
                              std::to_string(block_) +
                              ", so the checkpoint's scales are not the rank's");
  }
}

void Slicer::check(const Held& held, Index parts, const char* what) const {
  const TensorInfo& tensor = held.tensor;
  const Kind kind = held.holding.kind;
  switch (kind) {
    case Kind::replicated:
      break;
    case Kind::column:
    case Kind::gate:
    case Kind::up:
    case Kind::conv_column:
      require_rank(tensor, 1, 2);
      break;
    case Kind::row:
    case Kind::embedding:
    case Kind::head:
    case Kind::conv_row:
      require_rank(tensor, 2, 2);
      break;
    case Kind::query:
    case Kind::key:
    case Kind::value:
      require_rank(tensor, 1, 2);
      (void)attention_for(held, 0, parts);
      break;
    case Kind::conv_qkv:
      require_rank(tensor, 1, 2);
      (void)attention_for(held, tensor.shape.size() - 1, parts);
      break;
    case Kind::stacked:
    case Kind::stacked_rows:
    case Kind::stacked_columns:
      require_rank(tensor, 2, 4);
      break;
    case Kind::stacked_conv_rows:
    case Kind::stacked_conv_columns:
      require_rank(tensor, 3, 3);
      break;
  }
  if (const auto d = cut_dimension(tensor, kind)) {
    if (*d >= tensor.shape.size()) {
      require_rank(tensor, *d + 1, 4);
    }
    require_divides(held, *d, parts, what);
  }
  if (held.weight != nullptr) {
    check_scales(held, parts);
  }
}

std::vector<Piece> Slicer::pieces(const Held& held, const Part& part) const {
  const TensorInfo& tensor = held.tensor;
  const Kind kind = held.holding.kind;
  const Shape& shape = tensor.shape;
  Pieces pieces(tensor);
  const bool matrix = shape.size() == 2;  // of the conv_ kinds: weights, not biases
  switch (kind) {
    case Kind::replicated:
      pieces.add(Box::whole(shape));
      break;
    case Kind::column:
      pieces.add(pieces.slice(0, own(held, 0, part)));
      break;
    case Kind::row:
      pieces.add(pieces.slice(1, own(held, 1, part)));
      break;
    case Kind::gate:
    case Kind::up: {
      const Box box = pieces.slice(0, own(held, 0, part));
      pieces.add(box, kind == Kind::gate ? 0 : box.volume());
      break;
    }
    case Kind::embedding:
    case Kind::head:
      pieces.add(pieces.slice(
          0, intersect(even(padded_vocabulary(shape[0]), part), Interval{0, shape[0]})));
      break;
    case Kind::query:
    case Kind::key:
    case Kind::value:
      for (const auto& [begin, range] :
           own_rows(attention_for(held, 0, part.parts), kind, 0, part)) {
        pieces.add(pieces.slice(0, range), begin * width(tensor));
      }
      break;
    case Kind::conv_column:
      pieces.add(pieces.slice(matrix ? 1 : 0, own(held, matrix ? 1 : 0, part)), 0,
                 matrix ? Strides{1, shape[0]} : Strides{1});
      break;
    case Kind::conv_row:
      pieces.add(pieces.slice(0, own(held, 0, part)), 0, Strides{1, shape[0] / part.parts});
      break;
    case Kind::conv_qkv: {
      const std::size_t d = matrix ? 1 : 0;
      const Index row = matrix ? shape[0] : 1;
      const Index queries = attention_->heads * attention_->head_dim;
      const Index keys = attention_->groups * attention_->head_dim;
      const std::pair<Kind, Index> members[] = {
          {Kind::query, 0}, {Kind::key, queries}, {Kind::value, queries + keys}};
      for (const auto& [member, first] : members) {
        for (const auto& [begin, range] : own_rows(*attention_, member, first, part)) {
          pieces.add(pieces.slice(d, range), begin * row, matrix ? Strides{1, row} : Strides{1});
        }
      }
      break;
    }
    case Kind::stacked:
    case Kind::stacked_rows:
    case Kind::stacked_columns:
    case Kind::stacked_conv_rows:
    case Kind::stacked_conv_columns: {
      Box box = pieces.slice(0, part.experts);
      if (const auto d = cut_dimension(tensor, kind)) {
        const Interval mine = own(held, *d, part);
        box.lo[*d] = mine.begin;
        box.hi[*d] = mine.end;
      }
      const bool turn = kind == Kind::stacked_conv_rows || kind == Kind::stacked_conv_columns;
      pieces.add(box, 0, turn ? turned(box.extents()) : row_major(box.extents()));
      break;
    }
  }
  return std::move(pieces.out);
}

Index Slicer::storage_elements(const Held& held, Index parts) const {
  const TensorInfo& tensor = held.tensor;
  const Kind kind = held.holding.kind;
  if (kind == Kind::gate || kind == Kind::up) {
    return checked_mul(2 * own(held, 0, {parts, 0, {}}).size(), width(tensor));
  }
  if (kind == Kind::embedding || kind == Kind::head) {
    return checked_mul(padded_vocabulary(tensor.shape[0]) / parts, width(tensor));
  }
  if (of_linear_qkv(kind)) {
    return checked_mul(attention_for(held, 0, parts).rows() / parts, width(tensor));
  }
  return 0;
}

}  // namespace m2n::sources::megatron
