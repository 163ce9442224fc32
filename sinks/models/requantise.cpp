// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/requantise.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/error.hpp"
#include "core/tensor/requantise.hpp"

namespace m2n::models {
namespace {

float scale_at(const std::byte* scales, Index i) {
  float scale = 0;
  std::memcpy(&scale, scales + static_cast<std::size_t>(i) * sizeof scale, sizeof scale);
  return scale;
}

void set_scale(std::byte* scales, Index i, float scale) {
  std::memcpy(scales + static_cast<std::size_t>(i) * sizeof scale, &scale, sizeof scale);
}

/// A scale that may be divided by. A block of padding has scale 0, and weights of 0.
float checked(float scale, const FusedRows& fused) {
  if (!(scale >= 0) || !std::isfinite(scale)) {
    throw Error(Errc::bad_argument, "parameter '" + fused.scales + "' has a scale of " +
                                        std::to_string(scale) +
                                        "; scales must be positive and finite");
  }
  return scale;
}

Index rows_of(const FusedRows& fused) {
  return std::accumulate(fused.rows.begin(), fused.rows.end(), Index{0});
}

float largest(const std::byte* scales, Index parts, const FusedRows& fused) {
  float result = 0;
  for (Index part = 0; part < parts; ++part) {
    result = std::max(result, checked(scale_at(scales, part), fused));
  }
  return result;
}

/// Of a local weight [..., rows, columns]: the last extent, and how many matrices there are.
Index columns_of(const Shape& weight) { return weight[weight.size() - 1]; }
Index matrices_of(const Shape& weight) { return weight.size() == 3 ? weight[0] : 1; }

void quantise_for_one_scale(const FusedRows& fused, std::span<const WritableView> views) {
  const Index parts = static_cast<Index>(fused.rows.size());
  const Index columns = columns_of(views[0].shape);
  std::byte* weights = views[0].data;
  for (Index expert = 0; expert < matrices_of(views[0].shape); ++expert) {
    std::byte* const scales =
        views[1].data + static_cast<std::size_t>(expert * parts) * sizeof(float);
    const float one = largest(scales, parts, fused);
    for (Index part = 0; part < parts; ++part) {
      const auto count =
          static_cast<std::uint64_t>(fused.rows[static_cast<std::size_t>(part)] * columns);
      if (one > 0) {
        requantise_f8_e4m3(weights, count, scale_at(scales, part), one);
      }
      set_scale(scales, part, one);
      weights += count;
    }
  }
}

/// One matrix, and its blocks.
class Blocks {
 public:
  Blocks(const FusedRows& fused, Index block_rows, Index block_columns, Index columns)
      : fused_(fused), block_rows_(block_rows), block_columns_(block_columns), columns_(columns) {}

  void quantise(std::byte* weights, std::byte* scales) const {
    Index at = 0;
    for (const Index rows : fused_.rows) {
      for (Index row = 0; row < rows; row += block_rows_) {
        const Index here = std::min(block_rows_, rows - row);
        for (Index column = 0; column < columns_; column += block_columns_, ++at) {
          const float from = checked(scale_at(scales, at), fused_);
          if (from > 0) {
            const float to = power_of_two_scale(from);
            quantise_block(weights + row * columns_ + column, here,
                           std::min(block_columns_, columns_ - column), from, to);
            set_scale(scales, at, to);
          }
        }
      }
      weights += rows * columns_;
    }
  }

  Index count() const {
    Index rows = 0;
    for (const Index part : fused_.rows) {
      rows += ceil_div(part, block_rows_);
    }
    return rows * ceil_div(columns_, block_columns_);
  }

 private:
  void quantise_block(std::byte* block, Index rows, Index columns, float from, float to) const {
    for (Index row = 0; row < rows; ++row) {
      requantise_f8_e4m3(block + row * columns_, static_cast<std::uint64_t>(columns), from, to);
    }
  }

  const FusedRows& fused_;
  Index block_rows_;
  Index block_columns_;
  Index columns_;
};

}  // namespace

Rewrite rewrite_for_one_scale(const FusedRows& fused) {
  return {{fused.weight, fused.scales},
          "quantised anew for one scale",
          [fused](std::span<const WritableView> views) { quantise_for_one_scale(fused, views); }};
}

DerivedTensor largest_scale(const std::string& name, const FusedRows& fused, Index experts) {
  const Shape shape = experts > 0 ? Shape{experts} : Shape{};
  return {name,
          DType::f32,
          shape,
          {fused.scales},
          [fused](std::span<const ParameterView> inputs, std::byte* out) {
            const auto parts = static_cast<Index>(fused.rows.size());
            for (Index i = 0; i < element_count(inputs[0].shape) / parts; ++i) {
              set_scale(out, i, scale_at(inputs[0].data, i * parts));  // all parts have it by now
            }
          }};
}

Rewrite rewrite_for_powers_of_two(const FusedRows& fused, Index block_rows, Index block_columns) {
  return {{fused.weight, fused.scales},
          "quantised anew for scales that are powers of two",
          [=](std::span<const WritableView> views) {
            const Index columns = columns_of(views[0].shape);
            const Blocks blocks(fused, block_rows, block_columns, columns);
            const Index matrices = matrices_of(views[0].shape);
            expects(matrices * blocks.count() == element_count(views[1].shape),
                    "one scale a block");
            for (Index expert = 0; expert < matrices; ++expert) {
              blocks.quantise(
                  views[0].data + expert * rows_of(fused) * columns,
                  views[1].data + expert * blocks.count() * static_cast<Index>(sizeof(float)));
            }
          }};
}

}  // namespace m2n::models
