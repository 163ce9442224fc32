// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// NVIDIA's reshard library (libnccl_m2n.so of the Python package nccl-extensions), loaded at run
/// time: the functions and structures of its C interface, version 2, that we use.

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>

namespace m2n::nccl_m2n {

/// Of the interface that the structures below follow.
constexpr unsigned kInterface = 2;
constexpr unsigned kConfigMagic = 0x4d324e32;
/// The oldest NCCL that the library works with.
constexpr int kOldestNccl = 2'30'05;

/// ncclMesh_t: an interval of ranks, arranged.
struct Mesh {
  std::size_t size = sizeof(Mesh);
  unsigned version = kInterface;
  int axes = 0;
  int* extents = nullptr;
  int start = 0;
};

/// ncclDistTensor_t: one side of a tensor as this rank sees it. Null data on the other side.
struct Tensor {
  std::size_t size = sizeof(Tensor);
  unsigned version = kInterface;
  void* data = nullptr;
  std::size_t* local_shape = nullptr;
  int rank = 0;
  ncclDataType_t dtype = ncclUint8;
  const Mesh* mesh = nullptr;
  int* placements = nullptr;
};

/// ncclM2nConfig_t.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = kInterface;
  int max_cta = -2147483647 - 1;  ///< This: the library's own choice.
};

using Handle = void*;

/// The library, loaded once a process and never unloaded. Its functions return NCCL's codes; a
/// handle keeps its process-wide state, which is made with the first and released with the last.
///
/// - Threads: calls of ranks that are threads of one process may meet; the library orders them.
class Library {
 public:
  /// @param path  A file, or a name that the loader finds.
  /// @throws Error{unavailable} with NCCL's version when that is too old, or the loader's words.
  static std::shared_ptr<const Library> load(const std::string& path);

  ncclResult_t (*init)(Handle*, const Config*) = nullptr;
  ncclResult_t (*finalize)(Handle) = nullptr;
  ncclResult_t (*reshard)(Handle, ncclComm_t, const Tensor*, const Tensor*, cudaStream_t) = nullptr;
  ncclResult_t (*group_start)() = nullptr;
  ncclResult_t (*group_end)() = nullptr;
  ncclResult_t (*group_abort)() = nullptr;
  const char* (*last_error)() = nullptr;

  /// @throws TransportError{peer_lost} "nccl_m2n: <doing>: <the library's words>".
  void require(ncclResult_t result, const std::string& doing) const;
};

/// Variables of the environment that the library reads when its first handle is made. While one of
/// these lives they are set; then they have their former values again.
///
/// - Threads: several may live at a time, all with the same settings.
/// - Errors: Error{bad_argument} when another with other settings lives.
class Settings {
 public:
  using Values = std::map<std::string, std::string>;
  explicit Settings(const Values& values);
  ~Settings();
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;
};

/// What the process writes to its standard output, where the library logs, while one of these
/// lives; lines that are not the library's are passed on in the end. Ranks that are threads share
/// one.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;
  /// So far.
  std::string text() const;
};

}  // namespace m2n::nccl_m2n
