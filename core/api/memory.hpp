// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What weights need of the memory that they live in, besides being moved: to be allocated, filled,
/// looked at, digested and copied there. Host memory is built in; the house that knows a device
/// adds its.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/api/buffers.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

/// One allocation, handed out in order. Buffers that are taken in the order in which parameters
/// move lie one after the other, so that their regions become one.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  virtual ~Arena() = default;

  /// The next @p bytes, at a multiple of @p align; zeroed. Owned by the arena.
  /// @throws Error{bad_argument} when it is full.
  virtual LocalBuffer take(std::uint64_t bytes, std::uint64_t align = 16) = 0;
};

/// Memory of one kind in this process.
///
/// - Threads: any.
/// - Memory: buffers are the caller's, of this kind.
/// - Streams: every call returns when its work is done; on a device it is ordered after all work
///   queued there before.
/// - Errors: Error{unavailable} where there is not that much memory or the device fails.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  /// "host", "cuda".
  virtual std::string_view name() const noexcept = 0;
  /// 1 for host memory.
  virtual int device_count() const = 0;
  /// For the record of a measurement: "NVIDIA H200, driver 12.8, CUDA 12.8".
  virtual std::string description(int device) const = 0;

  /// @param device  CUDA ordinal; of no meaning for host memory.
  virtual std::unique_ptr<Arena> reserve(std::uint64_t bytes, int device) const = 0;
  /// What reserve() could still give, about; UINT64_MAX where nobody knows.
  virtual std::uint64_t free_bytes(int device) const = 0;

  virtual void write(const LocalBuffer& to, std::span<const std::byte> from) const = 0;
  virtual void read(const LocalBuffer& from, std::span<std::byte> to) const = 0;
  virtual void zero(const LocalBuffer& buffer) const = 0;
  /// As many bytes as @p from has, as fast as one plain copy goes: on devices by a copy engine.
  virtual void copy(const LocalBuffer& from, const LocalBuffer& to) const = 0;

  /// fill_synthetic() and digest_of_box() of core/tensor/digest.hpp; the element at box.lo is the
  /// first of the buffer.
  virtual void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                              const LocalBuffer& to, const Strides& strides) const = 0;
  virtual std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                      const LocalBuffer& from, const Strides& strides) const = 0;
};

/// @throws Error{unavailable} for device memory where no house knows a device.
const Memory& memory_of(MemorySpace space);
inline const Memory& memory_of(const LocalBuffer& buffer) { return memory_of(buffer.space); }

/// Makes @p memory the process's device memory, once; later calls change nothing. The houses call
/// it when they are registered; @p memory lives until the process ends.
void provide_device_memory(std::unique_ptr<const Memory> memory);

}  // namespace m2n
