// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "nccl_reference": what trainers do today, for runs side by side.

#include "core/api/transport.hpp"
#include "core/api/plugins.hpp"
#include "transports/common/agree.hpp"
#include "transports/nccl_common/device_buffers.hpp"
#include "transports/nccl_reference/session.hpp"

namespace m2n {
namespace {

class ReferenceTransport final : public Transport {
 public:
  ReferenceTransport(const nccl_reference::ReferenceOptions& options, int max_cta)
      : connection_(std::make_shared<nccl_reference::Connection>()), max_cta_(max_cta) {
    connection_->options = options;
  }

  std::string_view name() const noexcept override { return "nccl_reference"; }
  /// Host memory is mirrored.
  bool moves(MemorySpace /*space*/) const noexcept override { return true; }

  void connect(Group& group, Deadline deadline) override {
    agree(group, "nccl_reference connect", error_of([&] {
            connection_->device =
                nccl::pick_device(nccl_reference::kWho, group.rank(), connection_->options.device);
          }),
          deadline);
    const nccl::DeviceGuard guard(connection_->device);
    connection_->group = &group;
    connection_->thread = std::make_shared<nccl::CallThread>(connection_->device);
    connection_->comm = std::make_unique<nccl::PlainCommunicator>(
        nccl_reference::kWho, group, connection_->thread, max_cta_, deadline);
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(connection_->group != nullptr, "connect() before prepare()");
    expects(program.rank == connection_->group->rank(), "the program of this rank");
    return nccl_reference::make_session(connection_, program, buffers, deadline);
  }

 private:
  std::shared_ptr<nccl_reference::Connection> connection_;
  int max_cta_ = 0;
};

}  // namespace

void add_transport_nccl_reference(Registries& registries) {
  registries.transports.add(
      "nccl_reference",
      "as trainers do today, to compare with: packed broadcast, broadcast, sends and receives",
      [](const TransportContext& context) {
        auto options = nccl_reference::ReferenceOptions::parse(context.options);
        if (context.device && options.device < 0) {
          options.device = *context.device;
        }
        return std::make_unique<ReferenceTransport>(options, context.max_cta.value_or(0));
      });
}

}  // namespace m2n
