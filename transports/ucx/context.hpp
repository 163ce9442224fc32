// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// UCX handles that own, and the only place where a ucs_status_t becomes an error.

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <utility>

#include "core/api/buffers.hpp"
#include "core/error.hpp"
#include "transports/ucx/options.hpp"

namespace m2n::ucx {

Errc to_errc(ucs_status_t status) noexcept;
/// @param what  The action and its subject: "register 8 bytes of weights".
inline void check(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) {
    throw TransportError(to_errc(status), "ucx: cannot " + what + ": " + ucs_status_string(status));
  }
}

class Context {
 public:
  explicit Context(const UcxOptions& options);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  ucp_context_h get() const noexcept { return raw_; }
  /// Version of the library, and its settings that have to be equal on all ranks.
  const std::string& settings() const noexcept { return settings_; }
  /// True when UCX may use memory that processes share.
  bool may_share_memory() const noexcept { return may_share_memory_; }
  /// True when UCX was built for CUDA, and has found it.
  bool knows_devices() const noexcept { return knows_devices_; }
  /// True when UCX keeps its direct lanes under peer error handling (from 1.16 on).
  static bool handles_errors_on_direct_lanes() noexcept;

 private:
  ucp_context_h raw_ = nullptr;
  std::string settings_;
  bool may_share_memory_ = false;
  bool knows_devices_ = false;
};

/// Memory that UCX knows: registered, or allocated by it so that processes of one machine can map
/// it. Keeps its context.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  /// Registers memory on loan.
  RegisteredMemory(std::shared_ptr<const Context> context, std::byte* data, std::uint64_t bytes,
                   MemorySpace space);
  /// Allocates.
  RegisteredMemory(std::shared_ptr<const Context> context, std::uint64_t bytes);
  RegisteredMemory(RegisteredMemory&& other) noexcept { *this = std::move(other); }
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(raw_, other.raw_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(space_, other.space_);
    return *this;
  }
  ~RegisteredMemory();

  std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  ucp_mem_h get() const noexcept { return raw_; }
  ucs_memory_type_t type() const noexcept {
    return space_ == MemorySpace::device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  }
  /// What a peer needs to reach it.
  std::string key() const;

 private:
  std::shared_ptr<const Context> context_;
  ucp_mem_h raw_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  MemorySpace space_ = MemorySpace::host;
};

/// A peer's memory, through one endpoint. Must go before the endpoint.
class RemoteKey {
 public:
  RemoteKey() = default;
  RemoteKey(ucp_ep_h endpoint, const std::string& key);
  RemoteKey(RemoteKey&& other) noexcept { *this = std::move(other); }
  RemoteKey& operator=(RemoteKey&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~RemoteKey();

  ucp_rkey_h get() const noexcept { return raw_; }
  /// Where this process sees the peer's @p address. @throws TransportError{unavailable}.
  std::byte* map(std::uint64_t address) const;

 private:
  ucp_rkey_h raw_ = nullptr;
};

}  // namespace m2n::ucx
