// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Asks NCCL, on the device, where a peer's window is mapped.

#include <cuda_runtime.h>
#include <nccl.h>

#if NCCL_VERSION_CODE >= 22800
#include <nccl_device.h>
#endif

namespace m2n::nccl {

#if NCCL_VERSION_CODE >= 22800

namespace {

__global__ void peer_base(ncclWindow_t window, int peer, void** out) {
  *out = ncclGetPeerPointer(window, 0, peer);
}

}  // namespace

void launch_peer_base(void* window, int peer, void** out) {
  peer_base<<<1, 1>>>(static_cast<ncclWindow_t>(window), peer, out);
}

#else

void launch_peer_base(void*, int, void**) {}

#endif

}  // namespace m2n::nccl
