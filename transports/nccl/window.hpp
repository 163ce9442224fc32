// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// NCCL windows: memory of every rank that the ranks of an NVLink domain map.

#include <cstdint>

#include "transports/nccl/communicator.hpp"

namespace m2n::nccl {

/// True when the headers and the loaded library have windows (NCCL 2.28).
bool windows_exist() noexcept;
/// Before 2.30.7, every rank registers the same number of bytes.
bool window_sizes_may_differ() noexcept;

/// A registered allocation. Collective.
class Window {
 public:
  Window(Communicator& comm, void* base, std::uint64_t bytes, Deadline deadline);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  /// Where this process sees @p peer's window, or 0 when it cannot.
  std::uint64_t base_of(Rank peer) const;

 private:
  Communicator& comm_;
  void* window_ = nullptr;
};

}  // namespace m2n::nccl
