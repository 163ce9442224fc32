// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Rounds that are calls of a library: queued by a CallThread on one stream, and over when that
/// stream is.

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "core/api/transport.hpp"
#include "transports/nccl/device.hpp"
#include "transports/nccl_common/call_thread.hpp"
#include "transports/nccl_common/device_buffers.hpp"

namespace m2n::nccl {

/// A round's calls. run() queues all of them so that @p stream ends last.
class StreamWork : public Work {
 public:
  Stream stream;
};

/// See Session. A rank that fails or is aborted does not tell the others, who notice by their
/// deadline: the caller tells them.
class CalledSession : public Session {
 public:
  void start(std::uint64_t version, Deadline deadline) final;
  RoundReport wait(Deadline deadline) final;
  void abort() noexcept final { aborted_ = true; }

 protected:
  /// @param name  Of the transport, for messages. @param stream  The caller's, as a number; 0: the
  /// legacy default stream. @pre @p device is current.
  CalledSession(std::string name, int device, std::uint64_t stream,
                std::shared_ptr<CallThread> thread);
  /// @pre Of a derived class's destructor: it called finish().
  ~CalledSession() override = default;

  /// Throws what the library has found by itself.
  virtual void poll() = 0;
  /// What may still run is left alone, with its memory. Called once.
  virtual void give_up() noexcept = 0;
  /// After each round's end.
  virtual void round_over() {}

  /// Gives up on a round that is under way, and makes the device current.
  void finish() noexcept;
  /// Runs @p work and waits for its stream. @throws TransportError; the work may still run then.
  void run_now(const std::shared_ptr<StreamWork>& work, const char* doing, Deadline deadline);

  std::shared_ptr<StreamWork> round_;  ///< Set by the derived constructor.
  DeviceBuffers buffers_;
  RoundReport report_;

 private:
  static bool is_over(cudaStream_t stream);
  bool over();
  [[noreturn]] void fail(Errc code, const std::string& text);

  std::string name_;
  int device_;
  cudaStream_t caller_stream_;
  std::shared_ptr<CallThread> thread_;
  Event caller_;
  std::chrono::steady_clock::time_point started_;
  bool running_ = false;
  bool queued_ = false;
  bool broken_ = false;
  std::atomic<bool> aborted_{false};
};

}  // namespace m2n::nccl
