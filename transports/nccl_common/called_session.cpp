// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_common/called_session.hpp"

#include <thread>
#include <utility>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookInterval{10};
constexpr std::uint64_t kSpins = 2000;  // before the thread offers its processor to others

}  // namespace

CalledSession::CalledSession(std::string name, int device, std::uint64_t stream,
                             std::shared_ptr<CallThread> thread)
    : name_(std::move(name)),
      device_(device),
      caller_stream_(stream == 0 ? cudaStreamLegacy : reinterpret_cast<cudaStream_t>(stream)),
      thread_(std::move(thread)) {}

void CalledSession::start(std::uint64_t version, Deadline /*deadline*/) {
  const DeviceGuard guard(device_);
  started_ = Clock::now();
  if (broken_ || aborted_) {
    throw TransportError(Errc::peer_lost, name_ + ": an earlier round failed");
  }
  report_.version = version;
  if (cudaStreamQuery(caller_stream_) != cudaSuccess) {  // something is still under way there
    cudaGetLastError();
    caller_.record(caller_stream_);
    caller_.hold(round_->stream);
  }
  buffers_.fill_mirrors(round_->stream);
  running_ = true;
  queued_ = false;
  thread_->post(round_);
}

RoundReport CalledSession::wait(Deadline deadline) {
  const DeviceGuard guard(device_);
  auto next_poll = Clock::now() + kLookInterval;
  for (std::uint64_t spin = 0; !over(); ++spin) {
    const auto now = Clock::now();
    if (aborted_) {
      fail(Errc::peer_lost, "round " + std::to_string(report_.version) + " was aborted");
    }
    if (now > deadline) {
      fail(Errc::timed_out, "the deadline passed in round " + std::to_string(report_.version) +
                                (queued_ ? "" : ", in a call of the library"));
    }
    if (now > next_poll) {
      next_poll = now + kLookInterval;
      try {
        poll();
      } catch (const Error& error) {
        fail(error.code(), error.what());
      }
    } else if (spin > kSpins) {
      std::this_thread::yield();
    }
  }
  if (buffers_.mirror_bytes() > 0) {
    buffers_.copy_back(round_->stream);
    check(cudaStreamSynchronize(round_->stream), "copy buffers to the host");
  }
  running_ = false;
  report_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  round_over();
  return report_;
}

void CalledSession::finish() noexcept {
  cudaSetDevice(device_);
  if (std::exchange(running_, false)) {
    buffers_.leak();
    give_up();
  }
}

void CalledSession::run_now(const std::shared_ptr<StreamWork>& work, const char* doing,
                            Deadline deadline) {
  thread_->post(work);
  while (!thread_->done() || !is_over(work->stream)) {
    if (Clock::now() > deadline) {
      throw TransportError(Errc::timed_out,
                           name_ + ": the deadline passed while waiting for the library to " +
                               doing + "; some rank did not come");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool CalledSession::is_over(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state != cudaErrorNotReady) {
    check(state, "run a round");
  }
  return state == cudaSuccess;
}

bool CalledSession::over() {
  try {
    queued_ = queued_ || thread_->done();
    return queued_ && is_over(round_->stream);
  } catch (const Error& error) {
    fail(error.code(), error.what());
  }
}

void CalledSession::fail(Errc code, const std::string& text) {
  std::string peers;
  for (const PeerTraffic& peer : report_.peers) {
    peers += (peers.empty() ? "" : ", ") + std::to_string(peer.peer);
  }
  broken_ = true;
  finish();
  throw TransportError(code, (text.starts_with(name_) ? "" : name_ + ": ") + text +
                                 "; ranks not done: unknown, any of " +
                                 (peers.empty() ? "none" : peers));
}

}  // namespace m2n::nccl
