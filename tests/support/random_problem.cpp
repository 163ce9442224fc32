// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_problem.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>

namespace m2n::testing {
namespace {

std::vector<Rank> shuffled(Dice& dice, Rank first, Rank count) {
  std::vector<Rank> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), first);
  if (dice.chance(50)) {
    for (std::size_t i = ranks.size(); i > 1; --i) {
      std::swap(ranks[i - 1], ranks[dice.below(i)]);
    }
  }
  return ranks;
}

Layout random_mesh_layout(Dice& dice, const Shape& shape, const std::vector<Rank>& ranks) {
  const auto count = static_cast<Index>(ranks.size());
  Index rows = 1;
  for (Index d = 2; d <= count; ++d) {
    if (count % d == 0 && dice.chance(50)) {
      rows = d;
    }
  }
  const Mesh mesh(rows == 1 ? Dims{count} : Dims{rows, count / rows}, ranks);
  std::vector<Placement> placements;
  for (std::size_t axis = 0; axis < mesh.dims().size(); ++axis) {
    const int dim = shape.empty() ? 0 : static_cast<int>(dice.below(shape.size()));
    if (shape.empty() || dice.chance(30)) {
      placements.push_back(Placement::replicate());
    } else if (dice.chance(25)) {
      placements.push_back(Placement::strided_shard(dim, dice.between(1, 3)));
    } else {
      placements.push_back(Placement::shard(dim));
    }
  }
  return Layout::sharded(shape, DType::i64, mesh, placements);
}

/// Row blocks, each on some ranks, and now and then a second block across others.
Layout random_pieces(Dice& dice, const Shape& shape, const std::vector<Rank>& ranks, bool overlap) {
  std::vector<RankPiece> pieces;
  std::map<Rank, std::uint64_t> used;
  const auto add = [&](Rank rank, const Box& box) {
    if (box.empty()) {
      return;
    }
    std::uint64_t& offset = used[rank];
    pieces.push_back({rank, {box, {0, offset, row_major(box.extents())}}});
    offset += static_cast<std::uint64_t>(box.volume()) * 8;
  };
  const std::size_t d = dice.below(shape.size());
  Index begin = 0;
  while (begin < shape[d]) {
    const Index end = std::min(shape[d], begin + dice.between(1, std::max<Index>(1, shape[d] / 2)));
    Box box = Box::whole(shape);
    box.lo[d] = begin;
    box.hi[d] = end;
    const std::size_t first = dice.below(ranks.size());
    const std::size_t copies = 1 + dice.below(std::min<std::size_t>(ranks.size(), 3));
    for (std::size_t c = 0; c < copies; ++c) {
      add(ranks[(first + c) % ranks.size()], box);
    }
    begin = end;
  }
  if (overlap && dice.chance(50)) {
    Box box = Box::whole(shape);
    for (std::size_t k = 0; k < shape.size(); ++k) {
      box.lo[k] = dice.between(0, shape[k]);
      box.hi[k] = dice.between(box.lo[k], shape[k]);
    }
    add(ranks[dice.below(ranks.size())], box);
  }
  return Layout::explicit_pieces(shape, DType::i64, ranks, std::move(pieces));
}

std::shared_ptr<const Layout> random_layout(Dice& dice, const Shape& shape, Rank first, Rank count,
                                            bool overlap) {
  const std::vector<Rank> ranks = shuffled(dice, first, count);
  const bool pieces = !shape.empty() && element_count(shape) > 0 && dice.chance(30);
  return std::make_shared<Layout>(pieces ? random_pieces(dice, shape, ranks, overlap)
                                         : random_mesh_layout(dice, shape, ranks));
}

std::int64_t element_number(std::uint32_t parameter, const Shape& shape, const Dims& at) {
  std::int64_t index = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    index = index * shape[d] + at[d];
  }
  return (std::int64_t{parameter} + 1) * 1'000'000 + index;
}

void for_each_element(const Piece& piece,
                      const std::function<void(const Dims& at, std::uint64_t byte)>& visit) {
  if (piece.box.empty()) {
    return;
  }
  Dims at = piece.box.lo;
  for (;;) {
    auto byte = static_cast<std::int64_t>(piece.view.offset_bytes);
    for (std::size_t d = 0; d < at.size(); ++d) {
      byte += (at[d] - piece.box.lo[d]) * piece.view.strides[d] * 8;
    }
    visit(at, static_cast<std::uint64_t>(byte));
    std::size_t d = at.size();
    while (d > 0 && ++at[d - 1] == piece.box.hi[d - 1]) {
      at[d - 1] = piece.box.lo[d - 1];
      --d;
    }
    if (d == 0) {
      return;
    }
  }
}

}  // namespace

Problem random_problem(Dice& dice) {
  const Rank sources = static_cast<Rank>(dice.between(1, 5));
  const Rank destinations = static_cast<Rank>(dice.between(1, 5));
  const Rank first = dice.chance(30)
                         ? static_cast<Rank>(dice.below(static_cast<std::uint64_t>(sources) + 1))
                         : sources;
  std::vector<Parameter> parameters;
  const Index count = dice.between(1, 4);
  for (Index i = 0; i < count; ++i) {
    if (!parameters.empty() && dice.chance(40)) {  // the same geometry again
      parameters.push_back(parameters.back());
    } else {
      Shape shape;
      const Index rank = dice.between(0, 3);
      for (Index d = 0; d < rank; ++d) {
        shape.push_back(dice.chance(5) ? 0 : dice.between(1, 9));
      }
      Parameter parameter;
      parameter.shape = shape;
      parameter.source.layout = random_layout(dice, shape, 0, sources, true);
      parameter.destination.layout = random_layout(dice, shape, first, destinations, false);
      parameters.push_back(std::move(parameter));
    }
    parameters.back().name = "p" + std::to_string(i);
    parameters.back().source.buffers = {parameters.back().name};
    parameters.back().destination.buffers = {parameters.back().name};
  }
  return Problem::make(std::move(parameters));
}

Topology random_topology(Dice& dice, Rank ranks) {
  Topology topology = Topology::single_island(ranks, static_cast<double>(dice.between(1, 4)) * 100);
  if (dice.chance(30)) {
    return topology;
  }
  topology.islands.clear();
  for (Rank rank = 0; rank < ranks; ++rank) {
    if (rank == 0 || dice.chance(40)) {
      topology.islands.emplace_back();
    }
    topology.islands.back().push_back(rank);
  }
  const bool shared = dice.chance(40);
  for (const auto& island : topology.islands) {
    for (const Rank rank : island) {
      const auto rate = static_cast<double>(dice.between(1, 3)) * 10;
      if (shared && rank != island.front()) {
        topology.nics.back().ranks.push_back(rank);
      } else {
        topology.nics.push_back({{rank}, rate, rate});
      }
    }
  }
  return topology;
}

std::string run_and_compare(const Plan& plan, const Problem& problem) {
  const auto world = static_cast<std::size_t>(problem.world_size());
  std::map<std::tuple<Rank, Role, std::uint32_t>, std::vector<std::byte>> memory;
  std::vector<Program> programs;
  for (Rank rank = 0; rank < problem.world_size(); ++rank) {
    programs.push_back(make_program(plan, problem, rank));
    for (const Role role : {Role::source, Role::destination}) {
      const std::vector<std::uint64_t> bytes = problem.buffer_bytes(role, rank);
      for (std::uint32_t b = 0; b < bytes.size(); ++b) {
        memory[{rank, role, b}].assign(bytes[b], std::byte{0xee});
      }
    }
    memory[{rank, Role::scratch, 0}].assign(programs.back().scratch_bytes, std::byte{0xdd});
  }
  const auto each = [&](Role role, const auto& visit) {
    for (std::uint32_t p = 0; p < problem.parameters().size(); ++p) {
      const Parameter& parameter = problem.parameters()[p];
      const Side& side = role == Role::source ? parameter.source : parameter.destination;
      for (const RankPiece& entry : side.layout->pieces()) {
        const std::uint32_t buffer = problem.buffers(role).of_parameter[p][entry.piece.view.buffer];
        std::vector<std::byte>& bytes = memory[{entry.rank, role, buffer}];
        for_each_element(entry.piece, [&](const Dims& at, std::uint64_t byte) {
          visit(entry.rank, parameter, at, element_number(p, parameter.shape, at),
                bytes.data() + byte);
        });
      }
    }
  };
  each(Role::source, [](Rank, const Parameter&, const Dims&, std::int64_t number, std::byte* at) {
    std::memcpy(at, &number, sizeof number);
  });
  for (std::uint32_t stage = 0; stage < plan.stage_count; ++stage) {
    for (std::size_t rank = 0; rank < world; ++rank) {
      // Receives and copies cover everything; sends are their other end.
      for (const auto* regions : {&programs[rank].receives, &programs[rank].copies}) {
        for (const Region& region : *regions) {
          if (region.stage == stage) {
            copy_region(region.copy,
                        memory[{region.from.rank, region.from.role, region.from.buffer}].data() +
                            region.from.offset_bytes,
                        memory[{region.to.rank, region.to.role, region.to.buffer}].data() +
                            region.to.offset_bytes);
          }
        }
      }
    }
  }
  std::string wrong;
  each(Role::destination, [&](Rank rank, const Parameter& parameter, const Dims& at,
                              std::int64_t number, const std::byte* place) {
    std::int64_t found = 0;
    std::memcpy(&found, place, sizeof found);
    if (found != number && wrong.empty()) {
      wrong = parameter.name + " element " + to_string(at) + " on rank " + std::to_string(rank) +
              " is " + std::to_string(found) + ", not " + std::to_string(number);
    }
  });
  return wrong;
}

}  // namespace m2n::testing
