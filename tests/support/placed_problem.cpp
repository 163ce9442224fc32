// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/placed_problem.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <tuple>

#include "core/tensor/block_scales.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/digest.hpp"
#include "core/tensor/requantise.hpp"

namespace m2n::testing {
namespace {

/// Global indices of each dimension in local order, on one rank.
using Lists = std::vector<std::vector<Index>>;

struct RankTensor {
  Rank rank = 0;
  Lists lists;
};

std::vector<Index> cut(const std::vector<Index>& list, Index parts, Index part) {
  const auto size = static_cast<Index>(list.size());
  const Index step = (size + parts - 1) / parts;
  const Index begin = std::min(size, part * step);
  const Index end = std::min(size, begin + step);
  return {list.begin() + begin, list.begin() + end};
}

Index count(const Lists& lists) {
  Index product = 1;
  for (const auto& list : lists) {
    product *= static_cast<Index>(list.size());
  }
  return product;
}

/// Calls visit(local coordinate, global flat index) for every element, row-major.
template <class Visit>
void for_each_element(const Lists& lists, const Shape& shape, Visit visit) {
  const Index all = count(lists);
  for (Index n = 0; n < all; ++n) {
    Dims local = Dims::filled(lists.size(), 0);
    Index rest = n;
    for (std::size_t d = lists.size(); d-- > 0;) {
      local[d] = rest % static_cast<Index>(lists[d].size());
      rest /= static_cast<Index>(lists[d].size());
    }
    Index flat = 0;
    for (std::size_t d = 0; d < lists.size(); ++d) {
      flat = flat * shape[d] + lists[d][static_cast<std::size_t>(local[d])];
    }
    visit(local, flat);
  }
}

class Generator {
 public:
  Generator(std::mt19937_64& random, const PlacedLimits& limits)
      : random_(random), limits_(limits) {}

  PlacedProblem make() {
    const auto parameters = static_cast<std::size_t>(pick(1, Index(limits_.parameters)));
    for (std::size_t i = 0; i < parameters; ++i) {
      Parameter parameter;
      parameter.name = "p" + std::to_string(i);
      parameter.shape = random_shape();
      parameters_.push_back(std::move(parameter));
      dtypes_.push_back(random_dtypes());
      parameters_.back().cast = dtypes_.back().first != dtypes_.back().second;
    }
    if (limits_.casts && limits_.quantised && chance(35)) {
      add_quantised();
    }
    make_side(&Parameter::source, truth_.source, true);
    make_side(&Parameter::destination, truth_.destination, false);
    return {Problem::make(std::move(parameters_)), std::move(truth_)};
  }

 private:
  using Places = std::map<std::pair<Rank, std::string>, std::vector<Place>>;

  Index pick(Index lo, Index hi) { return std::uniform_int_distribution<Index>(lo, hi)(random_); }
  bool chance(int percent) { return pick(1, 100) <= percent; }

  Shape random_shape() {
    Shape shape;
    Index room = limits_.elements;
    for (Index d = pick(0, 4); d > 0; --d) {
      const Index extent = chance(4) ? 0 : pick(1, std::max<Index>(1, std::min<Index>(room, 12)));
      shape.push_back(extent);
      room /= std::max<Index>(1, extent);
    }
    return shape;
  }

  /// A weight of up to four dimensions and its scales.
  void add_quantised() {
    static constexpr std::array kFloats = {DType::f32, DType::bf16, DType::f16};
    Parameter weight;
    weight.name = "q";
    Dims blocks;
    Index room = 3 * limits_.elements;
    for (Index d = pick(0, 4); d > 0; --d) {
      weight.shape.push_back(chance(4) ? 0
                                       : pick(1, std::max<Index>(1, std::min<Index>(room, 24))));
      room /= std::max<Index>(1, weight.shape[weight.shape.size() - 1]);
      blocks.push_back(chance(30) ? 1 : pick(1, 8));
    }
    weight.quantise = Quantise{blocks, "q_scales"};
    Parameter scales;
    scales.name = "q_scales";
    scales.shape = scale_shape(weight.shape, blocks);
    const DType from = kFloats[static_cast<std::size_t>(pick(0, 2))];
    const bool scales_first = chance(30);
    for (int turn = 0; turn < 2; ++turn) {
      const bool now_scales = (turn == 0) == scales_first;
      parameters_.push_back(now_scales ? scales : weight);
      dtypes_.emplace_back(now_scales ? DType::f32 : from,
                           now_scales ? DType::f32 : DType::f8_e4m3);
    }
  }

  std::optional<std::size_t> scales_of(std::size_t i) const {
    if (parameters_[i].quantise) {
      for (std::size_t k = 0; k < parameters_.size(); ++k) {
        if (parameters_[k].name == parameters_[i].quantise->scales) {
          return k;
        }
      }
    }
    return std::nullopt;
  }
  bool holds_scales(std::size_t i) const {
    return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
      return p.quantise && p.quantise->scales == parameters_[i].name;
    });
  }

  /// Hands out whole blocks: a rank's indices of the scales say which blocks of the weight it has.
  void place_quantised(std::size_t i) {
    const std::size_t k = *scales_of(i);
    const Shape& blocks_shape = parameters_[k].shape;
    Dims mesh_dims;
    std::vector<Placement> placements;
    const Index size = random_mesh(blocks_shape, mesh_dims, placements);
    std::vector<RankTensor> scales;
    std::vector<RankTensor> weights;
    for (const Rank rank : random_ranks(static_cast<std::size_t>(size))) {
      const auto position = static_cast<Index>(scales.size());
      scales.push_back({rank, lists_at(blocks_shape, mesh_dims, placements, position)});
      RankTensor& weight = weights.emplace_back(RankTensor{rank, {}});
      for (std::size_t d = 0; d < blocks_shape.size(); ++d) {
        std::vector<Index>& list = weight.lists.emplace_back();
        const Index block = parameters_[i].quantise->blocks[d];
        for (const Index at : scales.back().lists[d]) {
          for (Index e = at * block; e < std::min((at + 1) * block, parameters_[i].shape[d]); ++e) {
            list.push_back(e);
          }
        }
      }
    }
    place_in_views(&Parameter::source, truth_.source, i, dtypes_[i].first, weights);
    place_in_views(&Parameter::source, truth_.source, k, DType::f32, scales);
  }

  std::pair<DType, DType> random_dtypes() {
    if (limits_.casts && chance(20)) {
      static constexpr std::array kFloats = {DType::f32, DType::bf16, DType::f16};
      return {kFloats[static_cast<std::size_t>(pick(0, 2))],
              kFloats[static_cast<std::size_t>(pick(0, 2))]};
    }
    static constexpr std::array kAny = {DType::u8,  DType::bf16,    DType::f32,
                                        DType::i64, DType::f8_e4m3, DType::boolean};
    const DType dtype = kAny[static_cast<std::size_t>(pick(0, 5))];
    return {dtype, dtype};
  }

  /// Some ranks of the world, in any order.
  std::vector<Rank> random_ranks(std::size_t most) {
    std::vector<Rank> all;
    for (Rank rank = 0; rank < limits_.ranks; ++rank) {
      all.push_back(rank);
    }
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(std::min(most, all.size()));
    return all;
  }

  void make_side(Side Parameter::*side, Places& places, bool source) {
    if (chance(12)) {
      make_flat_unit(side, places, source);
      return;
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (source && scales_of(i)) {
        place_quantised(i);
        continue;
      }
      if (source && holds_scales(i)) {
        continue;  // placed with its weight
      }
      const DType dtype = source ? dtypes_[i].first : dtypes_[i].second;
      const Shape& shape = parameters_[i].shape;
      Dims mesh_dims;
      std::vector<Placement> placements;
      const Index size = random_mesh(shape, mesh_dims, placements);
      const std::vector<Rank> ranks = random_ranks(static_cast<std::size_t>(size));
      std::vector<RankTensor> tensors;
      for (std::size_t position = 0; position < ranks.size(); ++position) {
        tensors.push_back(
            {ranks[position], lists_at(shape, mesh_dims, placements, Index(position))});
      }
      if (limits_.views && chance(45)) {
        place_in_views(side, places, i, dtype, tensors);
      } else {
        (parameters_[i].*side).layout =
            table_.intern(Layout::sharded(shape, dtype, Mesh(mesh_dims, ranks), placements));
        (parameters_[i].*side).buffers = {parameters_[i].name};
        place_compact(places, i, dtype, tensors);
      }
    }
  }

  /// @return its ranks.
  Index random_mesh(const Shape& shape, Dims& mesh_dims, std::vector<Placement>& placements) {
    Index size = 1;
    for (Index axis = pick(1, 3); axis > 0; --axis) {
      const Index extent = pick(1, std::max<Index>(1, std::min<Index>(4, limits_.ranks / size)));
      size *= extent;
      mesh_dims.push_back(extent);
      const Index kind = shape.empty() ? 0 : pick(0, 3);
      const int dim = shape.empty() ? 0 : static_cast<int>(pick(0, Index(shape.size()) - 1));
      placements.push_back(kind == 0   ? Placement::replicate()
                           : kind == 3 ? Placement::strided_shard(dim, pick(1, 4))
                                       : Placement::shard(dim));
    }
    return size;
  }

  Lists lists_at(const Shape& shape, const Dims& mesh, const std::vector<Placement>& placements,
                 Index position) {
    Dims at = Dims::filled(mesh.size(), 0);
    for (std::size_t axis = mesh.size(); axis-- > 0;) {
      at[axis] = position % mesh[axis];
      position /= mesh[axis];
    }
    Lists lists(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d) {
      for (Index i = 0; i < shape[d]; ++i) {
        lists[d].push_back(i);
      }
    }
    for (std::size_t axis = 0; axis < placements.size(); ++axis) {
      const Placement& placement = placements[axis];
      if (placement.kind == Placement::Kind::replicate) {
        continue;
      }
      auto& list = lists[static_cast<std::size_t>(placement.dim)];
      std::vector<Index> mine;
      for (Index j = 0; j < placement.split_factor; ++j) {
        const auto part = cut(cut(list, placement.split_factor, j), mesh[axis], at[axis]);
        mine.insert(mine.end(), part.begin(), part.end());
      }
      list = mine;
    }
    return lists;
  }

  void place_compact(Places& places, std::size_t i, DType dtype,
                     const std::vector<RankTensor>& tensors) {
    for (const RankTensor& tensor : tensors) {
      auto& list = places[{tensor.rank, parameters_[i].name}];
      Index n = 0;
      for_each_element(tensor.lists, parameters_[i].shape, [&](const Dims&, Index flat) {
        list.push_back({static_cast<std::uint32_t>(i), flat,
                        static_cast<std::uint64_t>(n++) * bytes_of(dtype)});
      });
    }
  }

  /// Puts each rank's local tensor into the side's fused buffer: dimensions stored in any order,
  /// rows padded, at any byte.
  void place_in_views(Side Parameter::*side, Places& places, std::size_t i, DType dtype,
                      const std::vector<RankTensor>& tensors) {
    const Shape& shape = parameters_[i].shape;
    const std::string buffer = "fused" + std::to_string(pick(0, 1));
    std::vector<RankPiece> pieces;
    std::vector<Rank> ranks;
    for (const RankTensor& tensor : tensors) {
      ranks.push_back(tensor.rank);
      std::vector<std::size_t> order(shape.size());
      for (std::size_t d = 0; d < order.size(); ++d) {
        order[d] = d;
      }
      std::shuffle(order.begin(), order.end(), random_);
      Strides strides = Dims::filled(shape.size(), 1);
      Index reach = 1;
      for (const std::size_t d : order) {
        strides[d] = reach;
        reach *= std::max<Index>(1, static_cast<Index>(tensor.lists[d].size()));
        reach += chance(30) ? pick(0, 2) : 0;
      }
      auto& end = buffer_end_[{side == &Parameter::source, tensor.rank, buffer}];
      const std::uint64_t offset = end + static_cast<std::uint64_t>(chance(50) ? pick(0, 9) : 0);
      const std::uint64_t item = bytes_of(dtype);
      end = offset + static_cast<std::uint64_t>(reach) * item;
      auto& list = places[{tensor.rank, buffer}];
      for_each_element(tensor.lists, shape, [&](const Dims& local, Index flat) {
        Index element = 0;
        for (std::size_t d = 0; d < local.size(); ++d) {
          element += local[d] * strides[d];
        }
        list.push_back({static_cast<std::uint32_t>(i), flat,
                        offset + static_cast<std::uint64_t>(element) * item});
      });
      append_pieces(tensor, strides, offset, item, pieces);
    }
    std::shuffle(pieces.begin(), pieces.end(), random_);
    (parameters_[i].*side).layout =
        table_.intern(Layout::explicit_pieces(shape, dtype, ranks, std::move(pieces)));
    (parameters_[i].*side).buffers = {buffer};
  }

  /// One piece a combination of runs of neighbouring indices.
  static void append_pieces(const RankTensor& tensor, const Strides& strides, std::uint64_t offset,
                            std::uint64_t item, std::vector<RankPiece>& pieces) {
    struct Run {
      Index local;
      Interval global;
    };
    std::vector<std::vector<Run>> runs;
    for (const auto& list : tensor.lists) {
      std::vector<Run> of_dim;
      for (std::size_t at = 0; at < list.size(); ++at) {
        if (!of_dim.empty() && of_dim.back().global.end == list[at]) {
          ++of_dim.back().global.end;
        } else {
          of_dim.push_back({Index(at), {list[at], list[at] + 1}});
        }
      }
      runs.push_back(std::move(of_dim));
    }
    std::vector<RankPiece> products{{tensor.rank, {{}, {0, offset, strides}}}};
    for (std::size_t d = 0; d < runs.size(); ++d) {
      std::vector<RankPiece> next;
      for (const RankPiece& base : products) {
        for (const Run& run : runs[d]) {
          RankPiece piece = base;
          piece.piece.box.lo.push_back(run.global.begin);
          piece.piece.box.hi.push_back(run.global.end);
          piece.piece.view.offset_bytes +=
              static_cast<std::uint64_t>(run.local * strides[d]) * item;
          next.push_back(piece);
        }
      }
      products = std::move(next);
    }
    pieces.insert(pieces.end(), products.begin(), products.end());
  }

  /// All parameters of one dtype in a flat buffer; the others get a replica on one rank.
  void make_flat_unit(Side Parameter::*side, Places& places, bool source) {
    const std::vector<Rank> ranks = random_ranks(static_cast<std::size_t>(pick(1, 5)));
    const auto dtype_of = [&](std::size_t i) {
      return source ? dtypes_[i].first : dtypes_[i].second;
    };
    const DType dtype = dtype_of(0);
    const Index align = pick(0, 2) * 4;
    std::vector<std::size_t> members;
    std::vector<Shape> shapes;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (source && scales_of(i)) {
        place_quantised(i);
        continue;
      }
      if (source && holds_scales(i)) {
        continue;
      }
      if (dtype_of(i) == dtype && !parameters_[i].shape.empty()) {
        members.push_back(i);
        shapes.push_back(parameters_[i].shape);
        continue;
      }
      (parameters_[i].*side).layout = table_.intern(Layout::sharded(
          parameters_[i].shape, dtype_of(i), Mesh({1}, ranks.front()), {Placement::replicate()}));
      (parameters_[i].*side).buffers = {parameters_[i].name};
      place_compact(
          places, i, dtype_of(i),
          {{ranks.front(), lists_at(parameters_[i].shape, {1}, {Placement::replicate()}, 0)}});
    }
    if (members.empty()) {
      return;
    }
    const FlatUnit unit = flat_unit(shapes, align, ranks.size());
    const Index part = (unit.elements + Index(ranks.size()) - 1) / Index(ranks.size());
    Index begin = 0;
    for (const std::size_t i : members) {
      begin += align > 0 ? (align - begin % align) % align : 0;
      (parameters_[i].*side).layout =
          table_.intern(Layout::flat(parameters_[i].shape, dtype, begin, unit.elements, ranks));
      (parameters_[i].*side).buffers = {"flat"};
      for (Index flat = 0; flat < element_count(parameters_[i].shape); ++flat) {
        const Index at = begin + flat;
        places[{ranks[static_cast<std::size_t>(at / part)], "flat"}].push_back(
            {static_cast<std::uint32_t>(i), flat,
             static_cast<std::uint64_t>(at % part) * bytes_of(dtype)});
      }
      begin += element_count(parameters_[i].shape);
    }
  }

  std::mt19937_64& random_;
  const PlacedLimits& limits_;
  std::vector<Parameter> parameters_;
  std::vector<std::pair<DType, DType>> dtypes_;
  Truth truth_;
  LayoutTable table_;
  std::map<std::tuple<bool, Rank, std::string>, std::uint64_t> buffer_end_;
};

float float_of(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::bf16:
      return f32_from_bf16(static_cast<std::uint16_t>(bits));
    case DType::f16:
      return f32_from_f16(static_cast<std::uint16_t>(bits));
    default:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  }
}

std::uint64_t bits_of_float(DType dtype, float value) {
  switch (dtype) {
    case DType::bf16:
      return bf16_from_f32(value);
    case DType::f16:
      return f16_from_f32(value);
    default:
      return std::bit_cast<std::uint32_t>(value);
  }
}

/// Of an element that will be quantised.
std::uint64_t moderate_bits(DType dtype, std::uint32_t parameter, Index flat) {
  const std::uint64_t random = test_bits(DType::u64, parameter, flat);
  const float sign = random % 2 == 0 ? 1.0F : -1.0F;
  if (test_bits(DType::u64, parameter, -1 - flat / 24) % 8 == 0) {
    return bits_of_float(dtype, sign * 0.0F);  // also whole blocks
  }
  switch (random / 2 % 24) {
    case 0:
      return bits_of_float(dtype, sign * 0.0F);
    case 1:
      return bits_of_float(dtype, sign) | (random >> 32) % 4;
    case 2:  // below the normal numbers
      return (bits_of_float(dtype, sign * 0.0F)) | (1 + (random >> 32) % 100);
    default:
      break;
  }
  const float size = 1 + static_cast<float>(random >> 40) * 0x1p-24F;
  return bits_of_float(dtype, sign * std::ldexp(size, static_cast<int>(random >> 32 & 15) - 9));
}

/// An element that is cast, or moved as it is.
std::uint64_t cast_bits(DType from, DType to, std::uint64_t bits) {
  return from == to ? bits : bits_of_float(to, float_of(from, bits));
}

/// Which block element @p flat of a tensor lies in, as a row-major number.
Index block_number(const Shape& shape, const Dims& blocks, Index flat) {
  Index number = 0;
  Index below = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    number += flat % shape[d] / blocks[d] * below;
    below *= ceil_div(shape[d], blocks[d]);
    flat /= shape[d];
  }
  return number;
}

}  // namespace

PlacedProblem placed_problem(std::mt19937_64& random, const PlacedLimits& limits) {
  return Generator(random, limits).make();
}

std::uint64_t test_bits(DType dtype, std::uint32_t parameter, Index flat) {
  return synthetic_bits(dtype, mix64(parameter + 1), static_cast<std::uint64_t>(flat));
}

TestValues::TestValues(const Problem& problem) : problem_(problem) {
  for (std::uint32_t i = 0; i < problem.parameters().size(); ++i) {
    const Parameter& weight = problem.parameters()[i];
    const auto holder = problem.scales_of(i);
    if (!holder) {
      continue;
    }
    std::vector<float>& scales = scales_[*holder];
    const Shape shape = problem.parameters()[*holder].shape;
    scales.assign(static_cast<std::size_t>(element_count(shape)), 0);
    for (Index flat = 0; flat < element_count(weight.shape); ++flat) {
      float& largest = scales[static_cast<std::size_t>(
          block_number(weight.shape, weight.quantise->blocks, flat))];
      largest = std::max(largest, std::fabs(float_of(weight.source_dtype(), source(i, flat))));
    }
    for (float& scale : scales) {
      scale = scale / 448.0F == 0 ? 1 : scale / 448.0F;
    }
  }
}

std::uint64_t TestValues::source(std::uint32_t parameter, Index flat) const {
  const DType dtype = problem_.parameters()[parameter].source_dtype();
  return problem_.scales_of(parameter) ? moderate_bits(dtype, parameter, flat)
                                       : test_bits(dtype, parameter, flat);
}

std::uint64_t TestValues::destination(std::uint32_t parameter, Index flat) const {
  const Parameter& p = problem_.parameters()[parameter];
  if (const auto held = scales_.find(parameter); held != scales_.end()) {
    return std::bit_cast<std::uint32_t>(held->second[static_cast<std::size_t>(flat)]);
  }
  const std::uint64_t bits = source(parameter, flat);
  if (const auto holder = problem_.scales_of(parameter)) {
    const float scale = scales_.at(
        *holder)[static_cast<std::size_t>(block_number(p.shape, p.quantise->blocks, flat))];
    return f8_e4m3_from_real(float_of(p.source_dtype(), bits) / scale);
  }
  return cast_bits(p.source_dtype(), p.destination_dtype(), bits);
}

}  // namespace m2n::testing
