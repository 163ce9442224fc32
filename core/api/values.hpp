// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Where the values of global tensors come from, apart from who holds them.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/registry.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// One tensor of a checkpoint.
struct TensorInfo {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};
/// An ordered list of tensors with unique names.
using Catalogue = std::vector<TensorInfo>;

/// Values that memory can make by itself: those of fill_synthetic() with @p seed, turned from
/// version 0 into @p version by change_values().
struct Formula {
  DType dtype = DType::f32;
  std::uint64_t seed = 0;
  std::uint64_t version = 0;
};

/// Global tensors that any rank may read any part of.
///
/// - Threads: read() may be called from several threads.
/// - Errors: Error{bad_argument} for an unknown name or a box outside; Error{io}.
class TensorValues {
 public:
  TensorValues() = default;
  TensorValues(const TensorValues&) = delete;
  TensorValues& operator=(const TensorValues&) = delete;
  virtual ~TensorValues() = default;

  /// Registry name: "safetensors", "synthetic", "hdf5".
  virtual std::string_view name() const noexcept = 0;
  virtual const Catalogue& catalogue() const = 0;
  /// Writes the elements of @p box of tensor @p name at @p data (element at box.lo), with
  /// @p strides in elements.
  virtual void read(std::string_view tensor, const Box& box, std::byte* data,
                    const Strides& strides) const = 0;
  /// The rule behind @p tensor, where read() follows one.
  virtual std::optional<Formula> formula(std::string_view /*tensor*/) const { return {}; }
};

struct ValuesContext {
  Options options;      ///< "path": file or folder, for the kinds that read one.
  Catalogue catalogue;  ///< For "synthetic": the tensors to make up.
};
using ValuesRegistry = Registry<TensorValues, ValuesContext>;

}  // namespace m2n
