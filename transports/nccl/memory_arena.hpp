// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The memory of weights on a device.

#include <cstdint>
#include <memory>

#include "core/api/memory.hpp"

namespace m2n::nccl {

/// Device memory in the form that other ranks can map: a window where ranks may have windows of
/// different sizes, as weights do, and plain memory, for CUDA IPC, elsewhere. Zeroed.
/// @throws Error{unavailable} where the device has not that much left.
std::unique_ptr<Arena> reserve_arena(int device, std::uint64_t bytes);

}  // namespace m2n::nccl
