// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Which elements of a tensor a Megatron rank holds, and where they lie in its local parameter.

#include <optional>
#include <vector>

#include "core/api/values.hpp"
#include "core/tensor/view.hpp"
#include "sources/megatron/names.hpp"
#include "sources/options.hpp"

namespace m2n::sources::megatron {

/// A tensor, how it is held, and, for scales, the weight that they belong to.
struct Held {
  const TensorInfo& tensor;
  const Holding& holding;
  const TensorInfo* weight = nullptr;
};

/// One of the ranks that cut a tensor among them.
struct Part {
  Index parts = 1;
  Index part = 0;
  Interval experts = {};  ///< Of a stacked tensor.
};

/// Query heads in groups, each with a key and a value head.
struct Attention {
  Index heads = 0;
  Index groups = 0;
  Index head_dim = 0;

  /// Of linear_qkv.
  Index rows() const { return checked_mul(heads + 2 * groups, head_dim); }
};

/// Reads heads, groups, head_dim, vocab_divisor and block. A loan of the options.
class Slicer {
 public:
  /// @throws Error{usage} for numbers that do not go together.
  Slicer(const OptionReader& options, Index tensor_parallel);

  /// @param what  Option that gives @p parts.
  /// @throws Error{bad_argument} naming the tensor, when its shape does not fit its kind, or a cut
  ///         into @p parts does not divide or falls inside blocks of scales.
  void check(const Held& held, Index parts, const char* what) const;

  /// @pre check() has passed.
  std::vector<Piece> pieces(const Held& held, const Part& part) const;

  /// Elements of the local parameter, where it holds more than this tensor; else 0.
  Index storage_elements(const Held& held, Index parts) const;

 private:
  Attention attention_for(const Held& held, std::size_t d, Index parts) const;
  void require_divides(const Held& held, std::size_t d, Index parts, const char* what) const;
  void check_scales(const Held& held, Index parts) const;
  Index padded_vocabulary(Index rows) const;
  Index block_of(const Held& held) const { return held.weight == nullptr ? 1 : block_; }
  Interval own(const Held& held, std::size_t d, const Part& part) const;

  const OptionReader& options_;
  Index tensor_parallel_;
  Index vocab_divisor_;
  Index block_;
  std::optional<Attention> attention_;  ///< When heads is given.
};

}  // namespace m2n::sources::megatron
