// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/window.hpp"

#include "core/error.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {

/// Defined in window_kernel.cu.
void launch_peer_base(void* window, int peer, void** out);

#if NCCL_VERSION_CODE >= 22800

namespace {

constexpr int kFirstVersion = 22800;
constexpr int kSizesMayDiffer = 23007;

}  // namespace

bool windows_exist() noexcept { return library_version() >= kFirstVersion; }
bool window_sizes_may_differ() noexcept { return library_version() >= kSizesMayDiffer; }

Window::Window(Communicator& comm, void* base, std::uint64_t bytes, Deadline deadline)
    : comm_(comm) {
  // The handle is written when the communicator has finished, not when the call returns.
  static_assert(sizeof(ncclWindow_t) == sizeof window_);
  const ncclResult_t result =
      ncclCommWindowRegister(comm.handle(), base, bytes, reinterpret_cast<ncclWindow_t*>(&window_),
                             NCCL_WIN_COLL_SYMMETRIC);
  comm.finish(result, "register a window", deadline);
}

Window::~Window() {
  if (window_ != nullptr && !comm_.aborted()) {
    ncclCommWindowDeregister(comm_.handle(), static_cast<ncclWindow_t>(window_));
  }
}

std::uint64_t Window::base_of(Rank peer) const {
  if (window_ == nullptr) {
    return 0;
  }
  DeviceMemory out(sizeof(void*));
  launch_peer_base(window_, static_cast<int>(peer), reinterpret_cast<void**>(out.data()));
  check(cudaGetLastError(), "ask for a peer's window");
  void* base = nullptr;
  check(cudaMemcpy(&base, out.data(), sizeof base, cudaMemcpyDeviceToHost),
        "ask for a peer's window");
  return reinterpret_cast<std::uint64_t>(base);
}

#else

bool windows_exist() noexcept { return false; }
bool window_sizes_may_differ() noexcept { return false; }
Window::Window(Communicator& comm, void*, std::uint64_t, Deadline) : comm_(comm) {}
Window::~Window() = default;
std::uint64_t Window::base_of(Rank) const { return 0; }

#endif

}  // namespace m2n::nccl
