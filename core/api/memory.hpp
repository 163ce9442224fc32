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
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/copy_queue.hpp"
#include "core/api/values.hpp"
#include "core/tensor/copy.hpp"
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

/// Where weights begin in an arena: on cache lines in host memory. On a device, where neighbours
/// should stay neighbours in a move, at what its widest access needs.
constexpr std::uint64_t weight_alignment(MemorySpace space) noexcept {
  return space == MemorySpace::host ? 64 : 16;
}

/// A box of a tensor, and where it lies.
struct PlacedBox {
  Shape shape;  ///< Global, for the element index.
  Box box;
  DType dtype = DType::f32;  ///< Of the elements there.
  LocalBuffer at;            ///< Starts with the element at box.lo.
  Strides strides;           ///< In elements, one a dimension.
};

/// The scales of a box whose elements are quantised (see core/tensor/block_scales.hpp).
struct PlacedScales {
  Dims blocks;      ///< Extents of a block, one a dimension of the box.
  LocalBuffer at;   ///< f32; starts with the scale of the block that box.lo lies in.
  Strides strides;  ///< In scales, one a dimension.
};

/// A box whose elements are digested after a cast, where the types differ; quantised under
/// @p scales where those are f8_e4m3 and a float.
struct DigestOf {
  PlacedBox placed;
  DType as = DType::f32;
  PlacedScales scales = {};
};

/// A box of whole blocks, and the place for their scales.
struct ScalesOf {
  PlacedBox placed;
  PlacedScales scales;
};

/// A box that must hold the values of a formula, cast to the type of its elements.
struct FormulaBox {
  PlacedBox placed;
  Formula formula;
};

/// What a comparison found. Elements are numbered in row-major order of the box.
struct Wrong {
  std::uint64_t count = 0;
  std::uint64_t first = 0;  ///< Of no meaning without a count.
};

/// Memory of one kind in this process.
///
/// - Threads: any.
/// - Memory: buffers are the caller's, of this kind.
/// - Streams: a call returns when its work is done. It waits for no other work, so that ranks that
///   share a device do not hold each other up: who lends memory has finished writing it.
/// - Errors: Error{unavailable} where there is not that much memory; Error when the device fails.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  /// "host", "cuda".
  virtual std::string_view name() const noexcept = 0;
  /// 1 for host memory; 0 where there is none that works.
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

  /// copy_region() of core/tensor/copy.hpp. Buffers start with the region's first element; one of
  /// them may be host memory, and then a bounded part of the region is staged at a time.
  virtual void copy(const StridedCopy& region, const LocalBuffer& from,
                    const LocalBuffer& to) const = 0;

  /// block_scales() of core/tensor/block_scales.hpp, of each of @p boxes.
  virtual void block_scales(std::span<const ScalesOf> boxes) const = 0;
  /// copy_region() of a region that quantises, all three operands in this memory.
  virtual void quantise(const StridedCopy& region, const LocalBuffer& from,
                        const LocalBuffer& scales, const LocalBuffer& to) const = 0;

  /// For copies of this memory's buffers, all of one device, that are made again and again.
  virtual std::unique_ptr<CopyQueue> copy_queue(int device) const;

  /// The allocation that @p buffer lies in, as far as it is known: memory that is registered, or
  /// mapped elsewhere, as a whole.
  virtual LocalBuffer allocation_of(const LocalBuffer& buffer) const { return buffer; }

  /// Makes host memory known to devices, so that they read and write it at their full rate, for as
  /// long as what is returned lives. Null where that cannot be done, or would gain nothing.
  /// @p host outlives it.
  virtual std::shared_ptr<void> pin(std::span<std::byte> host) const;

  /// Makes @p device current in this thread, for libraries that look at that. @return the former
  /// one, to be given back; see CurrentDevice.
  virtual int exchange_current_device(int device) const noexcept { return device; }

  /// fill_synthetic() of core/tensor/digest.hpp; the element at box.lo is the first of the buffer.
  virtual void fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                              const LocalBuffer& to, const Strides& strides) const = 0;
  /// change_values() of core/tensor/changes.hpp, of each of @p boxes in their order.
  virtual void change(std::span<const PlacedBox> boxes, std::uint64_t from,
                      std::uint64_t to) const = 0;
  virtual std::vector<Wrong> compare(std::span<const FormulaBox> boxes) const = 0;
  void change(const PlacedBox& placed, std::uint64_t from, std::uint64_t to) const;  ///< Of one.
  Wrong compare(const PlacedBox& placed, const Formula& formula) const;              ///< Of one.

  /// digest_of_box() of core/tensor/digest.hpp, of each of @p boxes.
  virtual std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes) const = 0;
  std::uint64_t digest_of_box(const Shape& shape, const Box& box, DType dtype,
                              const LocalBuffer& from, const Strides& strides) const;
};

/// @throws Error{unavailable} for device memory where no house knows a device.
const Memory& memory_of(MemorySpace space);
inline const Memory& memory_of(const LocalBuffer& buffer) { return memory_of(buffer.space); }

/// Keeps a device current in this thread. Without one it does nothing.
class CurrentDevice {
 public:
  /// @throws Error{unavailable} for a device where no house knows any.
  explicit CurrentDevice(std::optional<int> device)
      : memory_(memory_of(device ? MemorySpace::device : MemorySpace::host)),
        former_(memory_.exchange_current_device(device.value_or(0))) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { memory_.exchange_current_device(former_); }

 private:
  const Memory& memory_;
  int former_;
};

/// Makes @p memory the process's device memory, unless there is one already that has a device.
/// Houses call it when they are registered, before anything is allocated. It lives until the
/// process ends.
void provide_device_memory(std::unique_ptr<const Memory> memory);

/// copy_region() of core/tensor/copy.hpp between memories of any kind. Buffers start with the
/// region's first element.
void copy_region(const StridedCopy& region, const LocalBuffer& from, const LocalBuffer& to);
/// Host memory as a buffer, for copy_region(). @p bytes is what is there.
LocalBuffer host_buffer(std::byte* data, std::uint64_t bytes);

/// Memory::digests() of boxes in memories of any kind. Scales lie where their elements do.
std::vector<std::uint64_t> digests(std::span<const DigestOf> boxes);
/// Memory::change() of boxes in memories of any kind.
void change(std::span<const PlacedBox> boxes, std::uint64_t from, std::uint64_t to);

/// Writes the elements of @p box of @p tensor at @p to (element at box.lo), in any memory: by their
/// formula where they have one, and otherwise a bounded part at a time.
void write_values(const TensorValues& values, const TensorInfo& tensor, const Box& box,
                  const LocalBuffer& to, const Strides& strides);

}  // namespace m2n
