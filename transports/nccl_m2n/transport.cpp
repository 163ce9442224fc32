// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "nccl_m2n": NVIDIA's reshard library, for runs side by side. It moves whole
/// parameters by rules of its own: which source replica serves whom does not follow the plan.

#include <algorithm>

#include "core/api/plugins.hpp"
#include "core/api/transport.hpp"
#include "transports/common/agree.hpp"
#include "transports/common/segment.hpp"
#include "transports/nccl_common/device_buffers.hpp"
#include "transports/nccl_m2n/session.hpp"

namespace m2n {
namespace {

class M2nTransport final : public Transport {
 public:
  M2nTransport(const nccl_m2n::M2nOptions& options, int max_cta)
      : connection_(std::make_shared<nccl_m2n::Connection>()), max_cta_(max_cta) {
    connection_->options = options;
  }

  std::string_view name() const noexcept override { return "nccl_m2n"; }
  /// Host memory is mirrored.
  bool moves(MemorySpace /*space*/) const noexcept override { return true; }

  void connect(Group& group, Deadline deadline) override {
    agree(group, "nccl_m2n connect", error_of([&] {
            connection_->device =
                nccl::pick_device(nccl_m2n::kWho, group.rank(), connection_->options.device);
            connection_->library = nccl_m2n::Library::load(connection_->options.library);
          }),
          deadline);
    const nccl::DeviceGuard guard(connection_->device);
    const std::vector<std::string> hosts =
        group.all_gather("nccl_m2n hosts", machine_id(), deadline);
    connection_->one_host = std::all_of(hosts.begin(), hosts.end(),
                                        [&](const std::string& host) { return host == hosts[0]; });
    connection_->group = &group;
    connection_->thread = std::make_shared<nccl::CallThread>(connection_->device);
    connection_->comm = std::make_shared<nccl::PlainCommunicator>(
        nccl_m2n::kWho, group, connection_->thread, max_cta_, deadline);
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(connection_->group != nullptr, "connect() before prepare()");
    expects(program.rank == connection_->group->rank(), "the program of this rank");
    return nccl_m2n::make_session(connection_, program, buffers, deadline);
  }

 private:
  std::shared_ptr<nccl_m2n::Connection> connection_;
  int max_cta_ = 0;
};

}  // namespace

void add_transport_nccl_m2n(Registries& registries) {
  registries.transports.add(
      "nccl_m2n", "NVIDIA's reshard library, to compare with; needs libnccl_m2n.so and NCCL 2.30.5",
      [](const TransportContext& context) {
        nccl_m2n::M2nOptions options = nccl_m2n::M2nOptions::parse(context.options);
        if (context.device && options.device < 0) {
          options.device = *context.device;
        }
        const int max_cta = context.max_cta.value_or(0);
        if (max_cta > 0 && options.ctas == 0) {
          options.ctas = static_cast<std::uint64_t>(max_cta);
        }
        return std::make_unique<M2nTransport>(options, max_cta);
      });
}

}  // namespace m2n
