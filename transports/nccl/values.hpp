// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Digests and synthetic values of tensors in device memory: the rules of core/tensor/digest.hpp.

#include <cstdint>

#include "core/tensor/digest.hpp"

namespace m2n::nccl {

/// digest_of_box() of device memory. Waits for the result. The device of @p data must be current.
std::uint64_t device_digest_of_box(const Shape& shape, const Box& box, DType dtype,
                                   const std::byte* data, const Strides& strides);

/// fill_synthetic() of device memory. Returns when it is done.
void device_fill_synthetic(const Shape& shape, const Box& box, DType dtype, std::uint64_t seed,
                           std::byte* data, const Strides& strides);

}  // namespace m2n::nccl
