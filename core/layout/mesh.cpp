// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/layout/mesh.hpp"

#include <charconv>
#include <limits>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

Index mesh_size(const Dims& dims) {
  if (dims.empty()) {
    throw Error(Errc::bad_argument, "a mesh has no axis; it needs at least one");
  }
  Index size = 1;
  for (const Index extent : dims) {
    if (extent < 1) {
      throw Error(Errc::bad_argument, "mesh " + to_string(dims) + " has an axis of extent " +
                                          std::to_string(extent) + "; every axis needs at least 1");
    }
    size = checked_mul(size, extent, "number of ranks in a mesh");
  }
  if (size > std::numeric_limits<Rank>::max()) {
    throw Error(Errc::bad_argument, "mesh " + to_string(dims) +
                                        " has more ranks than a rank number "
                                        "can count (2^31-1)");
  }
  return size;
}

std::vector<Rank> contiguous(const Dims& dims, Rank start) {
  const Index size = mesh_size(dims);
  if (start < 0 || size - 1 > std::numeric_limits<Rank>::max() - Index{start}) {
    throw Error(Errc::bad_argument,
                "mesh start " + std::to_string(start) + " is out of range; ranks are 0 to 2^31-1");
  }
  std::vector<Rank> ranks(static_cast<std::size_t>(size));
  for (Index i = 0; i < size; ++i) {
    ranks[static_cast<std::size_t>(i)] = static_cast<Rank>(start + i);
  }
  return ranks;
}

/// "Name(a, b)" as a name and numbers; nothing for another form.
struct Call {
  std::string name;
  std::vector<Index> arguments;
};

std::optional<Call> parse_call(std::string_view text) {
  std::string compact;
  for (const char c : text) {
    if (c != ' ' && c != '\t') {
      compact += c;
    }
  }
  Call call;
  const std::size_t open = compact.find('(');
  call.name = compact.substr(0, open);
  if (open == std::string::npos) {
    return call;
  }
  if (compact.back() != ')') {
    return std::nullopt;
  }
  const char* at = compact.data() + open + 1;
  const char* const end = compact.data() + compact.size() - 1;
  while (at < end) {
    Index value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc{} || (next != end && *next != ',') || (next != end && next + 1 == end)) {
      return std::nullopt;
    }
    call.arguments.push_back(value);
    at = next == end ? end : next + 1;
  }
  return call;
}

}  // namespace

Mesh::Mesh(Dims dims, Rank start) : dims_(dims), ranks_(contiguous(dims, start)) {}

Mesh::Mesh(Dims dims, std::vector<Rank> ranks) : dims_(dims), ranks_(std::move(ranks)) {
  const Index size = mesh_size(dims_);
  if (std::cmp_not_equal(size, ranks_.size())) {
    throw Error(Errc::bad_argument, "mesh " + to_string(dims_) + " lists " +
                                        std::to_string(ranks_.size()) + " ranks; its axes need " +
                                        std::to_string(size));
  }
  std::vector<Rank> sorted = ranks_;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0) {
    throw Error(Errc::bad_argument, "mesh " + to_string(dims_) + " lists rank " +
                                        std::to_string(sorted.front()) + "; ranks start at 0");
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw Error(Errc::bad_argument, "mesh " + to_string(dims_) + " lists rank " +
                                        std::to_string(*twice) + " twice; each rank has one place");
  }
}

Dims Mesh::coordinate(std::size_t position) const {
  Dims coordinate = Dims::filled(dims_.size(), 0);
  auto rest = static_cast<Index>(position);
  for (std::size_t axis = dims_.size(); axis-- > 0;) {
    coordinate[axis] = rest % dims_[axis];
    rest /= dims_[axis];
  }
  return coordinate;
}

std::optional<Rank> Mesh::contiguous_start() const {
  for (std::size_t i = 1; i < ranks_.size(); ++i) {
    if (ranks_[i] != ranks_[i - 1] + 1) {
      return std::nullopt;
    }
  }
  return ranks_.front();
}

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::replicate:
      return "Replicate";
    case Placement::Kind::shard:
      return "Shard(" + std::to_string(placement.dim) + ")";
    case Placement::Kind::strided_shard:
      return "StridedShard(" + std::to_string(placement.dim) + "," +
             std::to_string(placement.split_factor) + ")";
  }
  return "unknown";
}

Placement placement_from_string(std::string_view text, std::size_t tensor_rank) {
  const std::optional<Call> call = parse_call(text);
  const auto dim_of = [&](Index dim) {
    const auto rank = static_cast<Index>(tensor_rank);
    if (dim < -rank || dim >= rank) {
      throw Error(Errc::bad_argument, "placement '" + std::string(text) + "' names dimension " +
                                          std::to_string(dim) + " of a tensor of rank " +
                                          std::to_string(tensor_rank));
    }
    return static_cast<int>(dim < 0 ? dim + rank : dim);
  };
  if (call) {
    if (call->name == "Partial") {
      throw Error(Errc::bad_argument,
                  "placement '" + std::string(text) +
                      "' is a pending reduction, not a state of weights; reduce it first");
    }
    if (call->name == "Replicate" && call->arguments.empty()) {
      return Placement::replicate();
    }
    if (call->name == "Shard" && call->arguments.size() == 1) {
      return Placement::shard(dim_of(call->arguments[0]));
    }
    if (call->name == "StridedShard" && call->arguments.size() == 2) {
      if (call->arguments[1] < 1) {
        throw Error(Errc::bad_argument, "placement '" + std::string(text) +
                                            "' has a split factor below 1; it needs at least 1");
      }
      return Placement::strided_shard(dim_of(call->arguments[0]), call->arguments[1]);
    }
  }
  throw Error(Errc::bad_argument,
              "placement '" + std::string(text) +
                  "' is unknown; the choices are Replicate, Shard(dim), StridedShard(dim,factor)");
}

}  // namespace m2n
