// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/engine.hpp"

#include <algorithm>
#include <cstdint>

#include "transports/nccl/device.hpp"

namespace m2n::nccl {
namespace {

#if CUDART_VERSION >= 13000
constexpr std::size_t kSmallestBatch = 8;  // below, single calls cost less
/// The engine begins when a call returns, and a call takes about half a microsecond a copy, a
/// fourth of what the copy of the smallest takes. So the first batch is small, and each is as large
/// as the engine is busy with the one before.
constexpr std::size_t kFirstBatch = 32;
constexpr std::size_t kBatchGrowth = 4;
constexpr std::uint64_t kWideRow = 64 << 10;

cudaMemcpy3DBatchOp wide_copy(const EngineCopy& copy) {
  const auto operand = [](std::uint64_t address, std::uint64_t pitch, std::uint64_t rows) {
    cudaMemcpy3DOperand out{};
    out.type = cudaMemcpyOperandTypePointer;
    out.op.ptr.ptr = reinterpret_cast<void*>(address);
    out.op.ptr.rowLength = pitch;
    out.op.ptr.layerHeight = rows;
    return out;
  };
  cudaMemcpy3DBatchOp op{};
  op.src = operand(copy.source, copy.source_pitch, copy.rows);
  op.dst = operand(copy.destination, copy.destination_pitch, copy.rows);
  op.extent = {copy.row_bytes, copy.rows, 1};
  op.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  op.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  return op;
}
#endif

}  // namespace

EngineBatch::EngineBatch(std::span<const EngineCopy> copies, bool captured) : captured_(captured) {
  for (const EngineCopy& copy : copies) {
#if CUDART_VERSION >= 13000
    if (!captured && copy.rows > 1 && copy.row_bytes >= kWideRow) {
      wide_.push_back(wide_copy(copy));
      continue;
    }
#endif
    if (copy.rows > 1) {
      pitched_.push_back(copy);
      continue;
    }
    targets_.push_back(reinterpret_cast<void*>(copy.destination));
    sources_.push_back(reinterpret_cast<const void*>(copy.source));
    sizes_.push_back(copy.row_bytes);
  }
}

bool EngineBatch::empty() const {
#if CUDART_VERSION >= 13000
  return targets_.empty() && pitched_.empty() && wide_.empty();
#else
  return targets_.empty() && pitched_.empty();
#endif
}

void EngineBatch::queue(cudaStream_t stream) {
  for (const EngineCopy& copy : pitched_) {
    check(cudaMemcpy2DAsync(reinterpret_cast<void*>(copy.destination), copy.destination_pitch,
                            reinterpret_cast<const void*>(copy.source), copy.source_pitch,
                            copy.row_bytes, copy.rows, cudaMemcpyDeviceToDevice, stream),
          "queue a pitched copy");
  }
#if CUDART_VERSION >= 13000
  if (!wide_.empty()) {
    check(cudaMemcpy3DBatchAsync(wide_.size(), wide_.data(), 0, stream),
          "queue a batch of pitched copies");
  }
  if (!captured_ && targets_.size() >= kSmallestBatch) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t attributes_from = 0;
    for (std::size_t at = 0, most = kFirstBatch; at < targets_.size(); most *= kBatchGrowth) {
      const std::size_t count = std::min(most, targets_.size() - at);
      check(cudaMemcpyBatchAsync(targets_.data() + at, sources_.data() + at, sizes_.data() + at,
                                 count, &attributes, &attributes_from, 1, stream),
            "queue a batch of copies");
      at += count;
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    check(cudaMemcpyAsync(targets_[i], sources_[i], sizes_[i], cudaMemcpyDeviceToDevice, stream),
          "queue a copy");
  }
}

}  // namespace m2n::nccl
