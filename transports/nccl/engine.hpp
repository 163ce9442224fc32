// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Copies for the copy engines, in the form in which the runtime takes many at once.

#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <vector>

#include "transports/nccl/tables.hpp"

namespace m2n::nccl {

/// The engine copies of one stage.
class EngineBatch {
 public:
  EngineBatch() = default;
  /// @param captured  The copies become nodes of a graph, where batches are not allowed.
  EngineBatch(std::span<const EngineCopy> copies, bool captured);

  bool empty() const;
  /// Queues all of them.
  void queue(cudaStream_t stream);

 private:
  bool captured_ = false;
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;
  std::vector<EngineCopy> pitched_;
#if CUDART_VERSION >= 13000
  std::vector<cudaMemcpy3DBatchOp> wide_;  ///< Pitched copies of wide rows: also in one call.
#endif
};

}  // namespace m2n::nccl
