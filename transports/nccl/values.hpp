// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Tensors in device memory as kernels see them, and the rules of core/tensor/digest.hpp there.

#include <cstdint>
#include <vector>

#include "core/api/memory.hpp"
#include "core/tensor/digest.hpp"
#include "transports/nccl/memory_kernels.hpp"

namespace m2n::nccl {

/// The elements of @p box, with as few dimensions as say it.
/// @throws Error{bad_argument} for a box outside of the shape.
ElementView element_view(const Shape& shape, const Box& box, DType dtype, const std::byte* data,
                         const Strides& strides);
inline ElementView element_view(const PlacedBox& placed) {
  return element_view(placed.shape, placed.box, placed.dtype, placed.at.data, placed.strides);
}

/// Appends what digests @p box: one task, or, where it is quantised, one for each part in which its
/// scales lie regularly; none for a box without elements. Their chunks are not numbered yet.
void append_digest_tasks(const DigestOf& box, std::vector<DigestTask>& tasks);

ValueRule value_rule(const Formula& formula);

/// Items as wide as both sides allow. @throws Error{bad_argument} where there is no cast.
/// @param scales  Of a region that quantises.
CopyView copy_view(const StridedCopy& region, const std::byte* source, std::byte* destination,
                   const std::byte* scales = nullptr);

/// The blocks of @p box, from scale @p first_scale of a table on.
ScaleTask scale_task(const ScalesOf& box, std::uint64_t first_scale);
std::uint64_t scale_count(const ScaleTask& task);

/// Whether @p copy is one run of bytes on both sides, unchanged.
bool is_plain(const CopyView& copy);

/// digest_of_box() of device memory. Waits for the result. The device of @p data must be current.
std::uint64_t device_digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                   const std::byte* data, const Strides& strides);

/// fill_synthetic() of device memory. Returns when it is done.
void device_fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                           std::byte* data, const Strides& strides);

}  // namespace m2n::nccl
