// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Lists of copies on a CUDA device.

#include <memory>

#include "core/api/copy_queue.hpp"

namespace m2n::nccl {

/// Small and strided regions of a list move by one kernel, through a staging area on the device and
/// with one plain copy to or from the host; large runs are plain copies. Lists take turns on two
/// streams, so that the kernel of one runs beside the plain copy of another.
std::unique_ptr<CopyQueue> make_copy_queue(int device);

}  // namespace m2n::nccl
