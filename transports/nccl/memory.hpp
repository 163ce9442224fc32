// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The memory of CUDA devices, for everything outside of this house: see core/api/memory.hpp.

#include "core/api/memory.hpp"

namespace m2n::nccl {

/// Makes CUDA's the process's device memory. Arenas can become NCCL windows.
void provide_cuda_memory();

}  // namespace m2n::nccl
