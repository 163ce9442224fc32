// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/greet.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {
namespace {

constexpr std::uint64_t kWord = sizeof(std::uint64_t);

/// "; ranks missing: ..." of those whose word is not there. @p words  Mine, then theirs.
std::string missing(const DeviceMemory& words, const std::vector<Rank>& peers) {
  std::vector<std::uint64_t> got(peers.size() + 1);
  const Stream stream;  // the default stream may wait for what hangs
  if (cudaMemcpyAsync(got.data(), words.data(), words.bytes(), cudaMemcpyDeviceToHost, stream) !=
          cudaSuccess ||
      cudaStreamSynchronize(stream) != cudaSuccess) {
    return "";
  }
  std::string text;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (got[i + 1] == 0) {
      text += (text.empty() ? "; ranks missing: " : ", ") + std::to_string(peers[i]);
    }
  }
  return text;
}

}  // namespace

void greet(Communicator& comm, const std::vector<Rank>& peers, Deadline deadline) {
  DeviceMemory words((peers.size() + 1) * kWord);
  const auto mine = reinterpret_cast<std::uint64_t>(words.data());
  check(cudaMemset(words.data(), 1, kWord), "greet the peers");
  check(cudaStreamSynchronize(nullptr), "greet the peers");
  std::vector<Message> sends;
  std::vector<Message> receives;
  for (const Rank peer : peers) {
    sends.push_back({peer, mine, kWord});
    receives.push_back({peer, mine + (receives.size() + 1) * kWord, kWord});
  }
  const Stream stream;
  try {
    comm.exchange(sends, receives, stream, deadline);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
      comm.poll();
      if (std::chrono::steady_clock::now() > deadline) {
        throw TransportError(Errc::timed_out, "nccl: the deadline passed while connecting ranks");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  } catch (const TransportError& error) {
    const std::string names = missing(words, peers);
    comm.abort();
    throw TransportError(error.code(), error.what() + names);
  }
  check(cudaStreamSynchronize(stream), "greet the peers");
}

}  // namespace m2n::nccl
