// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A resharding problem: parameters, and a layout of each on both sides. Plain data.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/layout/layout.hpp"

namespace m2n {

/// Which part a rank plays for a piece or a buffer. Scratch is memory that only a plan knows.
enum class Role : std::uint8_t { source, destination, scratch };
std::string_view to_string(Role role);

/// How the elements of a parameter become f8_e4m3 on their way: under one scale a block, computed
/// at the source from what it holds at the beginning of a round (core/tensor/block_scales.hpp).
struct Quantise {
  Dims blocks;  ///< Extents of a block, one a dimension of the parameter.
  /// The parameter of the same problem that holds the scales: f32, one a block, on each rank of
  /// the source those of the blocks that it holds. To the move it is one like any other.
  std::string scales;
};

/// A named global tensor as the checkpoint knows it, and how one side holds it.
struct ParamSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  Side side;
  /// Of a source: how it becomes f8_e4m3 for whoever wants that. Others take it as it is.
  std::optional<Quantise> quantise = {};
};

/// What both sides do with one parameter. The dtypes may differ when @p cast or @p quantise is set.
struct Parameter {
  std::string name;
  Shape shape;
  Side source;
  Side destination;
  bool cast = false;
  std::optional<Quantise> quantise = {};

  DType source_dtype() const { return source.layout->dtype(); }
  DType destination_dtype() const { return destination.layout->dtype(); }
  /// Bytes of the whole tensor at the destination's dtype: what travels, once.
  std::uint64_t bytes() const;
};

/// Names of the buffers of one side, and for each parameter the index of each of its slots.
struct BufferTable {
  std::vector<std::string> names;
  std::vector<std::vector<std::uint32_t>> of_parameter;  ///< [parameter][slot] -> index in names
};

/// An ordered list of parameters with unique names. Immutable once made.
class Problem {
 public:
  /// Validates everything that does not depend on a planner:
  /// unique names; equal shapes; dtypes that are byte sized and equal, or castable with cast set;
  /// or that quantise from whole blocks, with a parameter for the scales of each that does; every
  /// element held by some source; no two elements of a rank's destination at one address.
  /// @throws Error{bad_argument}, naming the parameter, the rank and the box.
  static Problem make(std::vector<Parameter> parameters);

  /// Reads a problem file (docs/problem-file.md). @throws Error{io, bad_argument}.
  static Problem read(const std::filesystem::path& file);
  static Problem parse(std::string_view json, const std::string& where);

  const std::vector<Parameter>& parameters() const noexcept { return parameters_; }
  /// One more than the largest rank on either side.
  Rank world_size() const noexcept { return world_size_; }
  /// Ranks of either side, sorted.
  const std::vector<Rank>& source_ranks() const noexcept { return source_ranks_; }
  const std::vector<Rank>& destination_ranks() const noexcept { return destination_ranks_; }

  /// The parameter that holds the scales of @p parameter, where that is quantised.
  std::optional<std::uint32_t> scales_of(std::uint32_t parameter) const;

  const BufferTable& buffers(Role role) const;
  /// Bytes that each buffer of @p role needs on @p rank, by index; 0 where it holds nothing.
  std::vector<std::uint64_t> buffer_bytes(Role role, Rank rank) const;

 private:
  std::vector<Parameter> parameters_;
  std::vector<Rank> source_ranks_;
  std::vector<Rank> destination_ranks_;
  Rank world_size_ = 0;
  BufferTable source_buffers_;
  BufferTable destination_buffers_;
  std::unordered_map<std::uint32_t, std::uint32_t> scales_of_;
};

}  // namespace m2n
