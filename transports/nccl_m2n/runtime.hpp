// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// NVIDIA's reshard library at work for one rank: its handle, its communicator, and what the
/// sessions of a transport share of it.

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "core/api/group.hpp"
#include "transports/nccl_common/plain_communicator.hpp"
#include "transports/nccl_m2n/library.hpp"
#include "transports/nccl_m2n/options.hpp"

namespace m2n::nccl_m2n {

/// The library's runtime as this rank uses it: settings in the environment, and a handle. The
/// library reads the settings when the first handle of the process is made, so one with other
/// settings must be made after every rank's is gone.
class Runtime {
 public:
  Runtime(std::shared_ptr<const Library> library, std::shared_ptr<nccl::CallThread> thread,
          const M2nOptions& options, bool logs);
  /// Releases the library's memory. @pre All work of the handle is over.
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Handle handle() const noexcept { return handle_; }
  /// Keeps the library's memory for good: work that cannot be stopped may use it.
  void leak() noexcept { leaked_ = true; }

 private:
  std::shared_ptr<const Library> library_;
  std::shared_ptr<nccl::CallThread> thread_;
  Settings settings_;
  Handle handle_ = nullptr;
  bool leaked_ = false;
};

/// What the sessions of one transport share.
struct Connection {
  Group* group = nullptr;
  M2nOptions options;
  int device = 0;
  bool one_host = true;
  std::shared_ptr<const Library> library;
  std::shared_ptr<nccl::CallThread> thread;
  std::shared_ptr<nccl::PlainCommunicator> comm;
  std::unique_ptr<Runtime> runtime;          ///< Made by the first prepare().
  std::uint64_t taken_bytes = 0;             ///< Of device memory, by the runtime.
  std::map<std::string, std::string> paths;  ///< That the library took, by pattern.
  bool broken = false;                       ///< A call failed: the library must not be used again.

  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();
};

}  // namespace m2n::nccl_m2n
