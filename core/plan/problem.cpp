// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/problem.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"
#include "core/plan/quantise.hpp"
#include "core/tensor/block_scales.hpp"
#include "core/tensor/cast.hpp"

namespace m2n {

std::string_view to_string(Role role) {
  switch (role) {
    case Role::source:
      return "source";
    case Role::destination:
      return "destination";
    case Role::scratch:
      return "scratch";
  }
  return "unknown";
}

std::uint64_t Parameter::bytes() const {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(shape)),
                           bytes_of(destination_dtype()), "bytes of a parameter");
}

namespace {

[[noreturn]] void bad_parameter(const std::string& parameter, const std::string& what) {
  throw Error(Errc::bad_argument, "parameter '" + parameter + "': " + what);
}

void check_side(const Parameter& parameter, const Side& side, Role role) {
  const std::string name(to_string(role));
  if (!side.layout) {
    bad_parameter(parameter.name, "the " + name + " has no layout");
  }
  if (side.layout->shape() != parameter.shape) {
    bad_parameter(parameter.name, "the " + name + " layout has shape " +
                                      to_string(side.layout->shape()) + ", the parameter " +
                                      to_string(parameter.shape));
  }
  if (side.buffers.size() < side.layout->slot_count()) {
    bad_parameter(parameter.name, "the " + name + " layout uses " +
                                      std::to_string(side.layout->slot_count()) + " buffers, but " +
                                      std::to_string(side.buffers.size()) + " are named");
  }
}

void check_dtypes(const Parameter& parameter) {
  const DType from = parameter.source_dtype();
  const DType to = parameter.destination_dtype();
  if (from == to || parameter.quantise) {
    return;
  }
  const std::string both = "the source has dtype " + std::string(to_string(from)) +
                           " and the destination " + std::string(to_string(to));
  if (can_quantise(from, to)) {
    bad_parameter(parameter.name, both +
                                      ", and nothing says how to quantise it; make them equal or "
                                      "set \"quantise\", with blocks and scales");
  }
  if (!can_cast(from, to)) {
    bad_parameter(parameter.name, both + ", and there is no cast between them; make them equal");
  }
  if (!parameter.cast) {
    bad_parameter(parameter.name,
                  both + ", and no cast was asked for; make them equal or set \"cast\": true");
  }
}

/// The union of the sources' boxes is the whole tensor. Meshes and flat buffers cover by design.
void check_source_cover(const Parameter& parameter) {
  std::set<Box> boxes;
  for (const RankPiece& entry : parameter.source.layout->pieces()) {
    boxes.insert(entry.piece.box);
  }
  const Box whole = Box::whole(parameter.shape);
  std::vector<Box> missing;
  if (!whole.empty()) {
    missing.push_back(whole);
  }
  for (const Box& box : boxes) {
    std::vector<Box> left;
    for (const Box& part : missing) {
      subtract(part, box, left);
    }
    missing = std::move(left);
  }
  if (!missing.empty()) {
    bad_parameter(parameter.name,
                  "the source layout does not cover the tensor: no rank holds box " +
                      to_string(missing.front()) + " of shape " + to_string(parameter.shape));
  }
}

/// A view of a destination buffer.
struct BufferUse {
  std::uint32_t parameter;
  const Piece* piece;
  std::uint64_t item_bytes;
  ByteSpan span;
};

/// Whether no two elements of the view share an address, by nested strides. Sufficient, and met by
/// every view that is a permuted or cut dense tensor.
bool strides_nest(const Shape& extents, const Strides& strides) {
  std::vector<std::pair<Index, Index>> by_stride;  // |stride|, extent
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] > 1) {
      by_stride.emplace_back(strides[d] < 0 ? -strides[d] : strides[d], extents[d]);
    }
  }
  std::sort(by_stride.begin(), by_stride.end());
  Index reach = 0;  // farthest element of the dimensions inside
  for (const auto& [stride, extent] : by_stride) {
    if (stride <= reach) {
      return false;
    }
    reach += stride * (extent - 1);
  }
  return true;
}

/// The byte ranges of a view's rows along its unit-stride dimension.
void append_rows(const BufferUse& use, std::vector<std::pair<ByteSpan, std::uint32_t>>& rows) {
  const Shape extents = use.piece->box.extents();
  const Strides& strides = use.piece->view.strides;
  std::size_t row_dim = kMaxRank;
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (strides[d] == 1 && (row_dim == kMaxRank || extents[d] > extents[row_dim])) {
      row_dim = d;
    }
  }
  const Index row = row_dim == kMaxRank ? 1 : extents[row_dim];
  Dims at = Dims::filled(extents.size(), 0);
  while (true) {
    Index element = 0;
    for (std::size_t d = 0; d < extents.size(); ++d) {
      element += at[d] * strides[d];
    }
    const std::uint64_t begin =
        use.piece->view.offset_bytes + static_cast<std::uint64_t>(element) * use.item_bytes;
    rows.push_back(
        {{begin, begin + static_cast<std::uint64_t>(row) * use.item_bytes}, use.parameter});
    std::size_t d = extents.size();
    while (d > 0 && (d - 1 == row_dim || ++at[d - 1] == extents[d - 1])) {
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

/// One buffer, rank by rank.
class DestinationMemory {
 public:
  explicit DestinationMemory(const std::vector<Parameter>& parameters) : parameters_(parameters) {}

  void add(Rank rank, const BufferUse& use) { uses_[rank].push_back(use); }

  /// No two elements at one address.
  void check() {
    for (auto& [rank, uses] : uses_) {
      std::sort(uses.begin(), uses.end(),
                [](const BufferUse& a, const BufferUse& b) { return a.span.begin < b.span.begin; });
      // Views whose spans overlap form a cluster; only inside one can addresses meet.
      std::size_t first = 0;
      std::uint64_t end = 0;
      for (std::size_t i = 0; i <= uses.size(); ++i) {
        if (i == uses.size() || (i > first && uses[i].span.begin >= end)) {
          check_cluster(rank, uses, first, i);
          first = i;
          end = 0;
        }
        if (i < uses.size()) {
          end = std::max(end, uses[i].span.end);
        }
      }
    }
  }

 private:
  void check_cluster(Rank rank, const std::vector<BufferUse>& uses, std::size_t first,
                     std::size_t last) const {
    if (first == last || (last - first == 1 && strides_nest(uses[first].piece->box.extents(),
                                                            uses[first].piece->view.strides))) {
      return;
    }
    std::vector<std::pair<ByteSpan, std::uint32_t>> rows;
    for (std::size_t i = first; i < last; ++i) {
      append_rows(uses[i], rows);
    }
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    for (std::size_t i = 1; i < rows.size(); ++i) {
      if (rows[i].first.begin < rows[i - 1].first.end) {
        bad_parameter(
            parameters_[rows[i].second].name,
            "two elements of the destination share byte " + std::to_string(rows[i].first.begin) +
                " of a buffer on rank " + std::to_string(rank) + " (the other belongs to '" +
                parameters_[rows[i - 1].second].name + "'); every element needs its own place");
      }
    }
  }

  const std::vector<Parameter>& parameters_;
  std::map<Rank, std::vector<BufferUse>> uses_;
};

BufferTable number_buffers(const std::vector<Parameter>& parameters, Side Parameter::*side) {
  BufferTable table;
  std::unordered_map<std::string, std::uint32_t> numbers;
  for (const Parameter& parameter : parameters) {
    std::vector<std::uint32_t> slots;
    for (const std::string& name : (parameter.*side).buffers) {
      const auto [at, added] =
          numbers.emplace(name, static_cast<std::uint32_t>(table.names.size()));
      if (added) {
        table.names.push_back(name);
      }
      slots.push_back(at->second);
    }
    table.of_parameter.push_back(std::move(slots));
  }
  return table;
}

/// Checks the destination's memory: buffers that several views share, or strides that may collide.
/// Buffers that the same layouts share in the same order are checked once.
void check_destination_memory(const std::vector<Parameter>& parameters,
                              const BufferTable& buffers) {
  struct User {
    std::uint32_t parameter;
    std::uint32_t slot;
  };
  std::vector<std::vector<User>> users(buffers.names.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<std::uint32_t>& slots = buffers.of_parameter[i];
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      users[slots[slot]].push_back(
          {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(slot)});
    }
  }
  std::set<std::vector<std::pair<const Layout*, std::uint32_t>>> checked;
  for (const std::vector<User>& sharing : users) {
    if (sharing.size() == 1 &&
        parameters[sharing.front().parameter].destination.layout->compact_by_design()) {
      continue;
    }
    std::vector<std::pair<const Layout*, std::uint32_t>> signature;
    for (const User& user : sharing) {
      signature.emplace_back(parameters[user.parameter].destination.layout.get(), user.slot);
    }
    if (!checked.insert(std::move(signature)).second) {
      continue;
    }
    DestinationMemory memory(parameters);
    for (const User& user : sharing) {
      const Layout& layout = *parameters[user.parameter].destination.layout;
      const std::uint64_t item_bytes = bytes_of(layout.dtype());
      for (const RankPiece& entry : layout.pieces()) {
        if (entry.piece.view.buffer == user.slot) {
          memory.add(entry.rank,
                     {user.parameter, &entry.piece, item_bytes,
                      byte_span(entry.piece.box.extents(), entry.piece.view, item_bytes)});
        }
      }
    }
    memory.check();
  }
}

std::vector<Rank> ranks_of_side(const std::vector<Parameter>& parameters, Side Parameter::*side) {
  std::unordered_set<const Layout*> seen;
  std::set<Rank> ranks;
  for (const Parameter& parameter : parameters) {
    const Layout* layout = (parameter.*side).layout.get();
    if (seen.insert(layout).second) {
      ranks.insert(layout->ranks().begin(), layout->ranks().end());
    }
  }
  return {ranks.begin(), ranks.end()};
}

/// [parameter] the one that holds its scales, where it has any.
std::unordered_map<std::uint32_t, std::uint32_t> find_scales(
    const std::vector<Parameter>& parameters) {
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  for (const Parameter& parameter : parameters) {
    numbers.emplace(parameter.name, static_cast<std::uint32_t>(numbers.size()));
  }
  std::unordered_map<std::uint32_t, std::uint32_t> scales_of;
  std::unordered_map<std::uint32_t, std::uint32_t> user_of;
  std::set<std::tuple<const Layout*, DType, const Layout*, Dims>> checked;
  for (std::uint32_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    if (!parameter.quantise) {
      continue;
    }
    const auto at = numbers.find(parameter.quantise->scales);
    if (at == numbers.end()) {
      check_quantised(parameter, nullptr);
    }
    const Parameter& scales = parameters[at->second];
    const auto [user, first] = user_of.emplace(at->second, i);
    if (!first) {
      bad_parameter(parameter.name, "its scales, '" + scales.name + "', are already those of '" +
                                        parameters[user->second].name +
                                        "'; each needs a parameter of its own");
    }
    scales_of.emplace(i, at->second);
    if (scales.quantise || scales.destination_dtype() != DType::f32 ||
        checked
            .emplace(parameter.source.layout.get(), parameter.destination_dtype(),
                     scales.source.layout.get(), parameter.quantise->blocks)
            .second) {
      check_quantised(parameter, &scales);
    }
  }
  return scales_of;
}

}  // namespace

Problem Problem::make(std::vector<Parameter> parameters) {
  Problem problem;
  problem.parameters_ = std::move(parameters);
  std::unordered_set<std::string_view> names;
  std::unordered_set<const Layout*> covered;
  for (const Parameter& parameter : problem.parameters_) {
    if (!names.insert(parameter.name).second) {
      bad_parameter(parameter.name, "the name is declared twice; names must be unique");
    }
    check_side(parameter, parameter.source, Role::source);
    check_side(parameter, parameter.destination, Role::destination);
    check_dtypes(parameter);
    const Layout* source = parameter.source.layout.get();
    if (!source->covers_by_design() && covered.insert(source).second) {
      check_source_cover(parameter);
    }
  }
  problem.scales_of_ = find_scales(problem.parameters_);
  problem.source_buffers_ = number_buffers(problem.parameters_, &Parameter::source);
  problem.destination_buffers_ = number_buffers(problem.parameters_, &Parameter::destination);
  check_destination_memory(problem.parameters_, problem.destination_buffers_);
  problem.source_ranks_ = ranks_of_side(problem.parameters_, &Parameter::source);
  problem.destination_ranks_ = ranks_of_side(problem.parameters_, &Parameter::destination);
  for (const auto* ranks : {&problem.source_ranks_, &problem.destination_ranks_}) {
    if (!ranks->empty()) {
      problem.world_size_ = std::max(problem.world_size_, ranks->back() + 1);
    }
  }
  return problem;
}

std::optional<std::uint32_t> Problem::scales_of(std::uint32_t parameter) const {
  const auto at = scales_of_.find(parameter);
  return at == scales_of_.end() ? std::nullopt : std::optional(at->second);
}

const BufferTable& Problem::buffers(Role role) const {
  expects(role != Role::scratch, "a side of the problem");
  return role == Role::source ? source_buffers_ : destination_buffers_;
}

std::vector<std::uint64_t> Problem::buffer_bytes(Role role, Rank rank) const {
  const BufferTable& table = buffers(role);
  std::vector<std::uint64_t> bytes(table.names.size(), 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Side& side = role == Role::source ? parameters_[i].source : parameters_[i].destination;
    const std::uint64_t item_bytes = bytes_of(side.layout->dtype());
    for (const RankPiece& entry : side.layout->pieces_of(rank)) {
      std::uint64_t& most = bytes[table.of_parameter[i][entry.piece.view.buffer]];
      most = std::max(most, byte_span(entry.piece.box.extents(), entry.piece.view, item_bytes).end);
    }
  }
  return bytes;
}

}  // namespace m2n
