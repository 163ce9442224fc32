// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "nccl": ranks with a CUDA device each. See queue.cpp for how a round runs.

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/api/transport.hpp"
#include "transports/nccl/memory.hpp"
#include "transports/nccl/session.hpp"

namespace m2n {
namespace {

using nccl::Connection;
using nccl::Identity;
using nccl::NcclOptions;

/// Lets @p device reach @p other, once a process. @p device is current.
void map_device(int device, int other) {
  static std::mutex mutex;
  static std::set<std::pair<int, int>> mapped;
  const std::lock_guard lock(mutex);
  if (mapped.contains({device, other})) {
    return;
  }
  const cudaError_t result = cudaDeviceEnablePeerAccess(other, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {  // by the program around us
    cudaGetLastError();
  } else {
    nccl::check(result, "map the memory of another device");
  }
  mapped.insert({device, other});
}

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const NcclOptions& options) : connection_(std::make_shared<Connection>()) {
    connection_->options = options;
  }

  std::string_view name() const noexcept override { return "nccl"; }
  /// Host memory is mirrored.
  bool moves(MemorySpace /*space*/) const noexcept override { return true; }

  void connect(Group& group, Deadline deadline) override {
    // Every rank says what it has or why it cannot, so that all of them end alike.
    std::string mine;
    try {
      const int device = pick_device(group.rank());
      const nccl::DeviceGuard guard(device);
      mine = "+" + Identity::mine(device).encode();
      connection_->device = device;
    } catch (const Error& error) {
      mine = std::string("-") + error.what();
    }
    const std::vector<std::string> all = group.all_gather("nccl connect", mine, deadline);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty() || all[rank][0] != '+') {
        throw TransportError(Errc::unavailable, "rank " + std::to_string(rank) + ": " +
                                                    (all[rank].empty() ? "" : all[rank].substr(1)));
      }
    }
    for (const std::string& text : all) {
      connection_->ranks.push_back(Identity::decode(text.substr(1)));
    }
    map_devices_of_this_process(group.rank());
    connection_->group = &group;
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(connection_->group != nullptr, "connect() before prepare()");
    expects(program.rank == connection_->group->rank(), "the program of this rank");
    return nccl::make_session(connection_, program, buffers, deadline);
  }

 private:
  int pick_device(Rank rank) const {
    int count = 0;
    const cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess || count == 0) {
      cudaGetLastError();
      throw TransportError(
          Errc::unavailable,
          std::string("transport 'nccl' needs a CUDA device and this machine "
                      "has none that works (") +
              cudaGetErrorString(result == cudaSuccess ? cudaErrorNoDevice : result) +
              "), expected a GPU with its driver; without one take 'loopback'");
    }
    const int device = connection_->options.device;
    if (device >= count) {
      throw TransportError(Errc::bad_argument,
                           "transport 'nccl': device " + std::to_string(device) +
                               ", expected a number below " + std::to_string(count));
    }
    return device >= 0 ? device : static_cast<int>(rank % count);
  }

  void map_devices_of_this_process(Rank rank) const {
    const Identity& me = connection_->ranks[static_cast<std::size_t>(rank)];
    const nccl::DeviceGuard guard(connection_->device);
    for (const Identity& other : connection_->ranks) {
      const bool reachable =
          std::find(me.reaches.begin(), me.reaches.end(), other.bus) != me.reaches.end();
      if (other.host != me.host || other.process != me.process || !reachable) {
        continue;
      }
      map_device(connection_->device, other.device);
    }
  }

  std::shared_ptr<Connection> connection_;
};

}  // namespace

void add_transport_nccl(Registries& registries) {
  // Ranks that are threads of one process and share a device wait for one another on its streams;
  // the driver has 8 hardware queues for them unless it is asked, before its first call, for more.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // NOLINT(concurrency-mt-unsafe)
  nccl::provide_cuda_memory();
  registries.transports.add("nccl", "one CUDA device a rank, over NVLink, IPC and NCCL",
                            [](const TransportContext& context) {
                              NcclOptions options = NcclOptions::parse(context.options);
                              if (context.max_cta) {
                                options.max_cta = *context.max_cta;
                                options.blocks = std::min(options.blocks, options.max_cta);
                              }
                              if (context.device && options.device < 0) {
                                options.device = *context.device;
                              }
                              return std::make_unique<NcclTransport>(options);
                            });
}

}  // namespace m2n
