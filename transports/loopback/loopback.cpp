// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "loopback": host memory of one machine. Ranks are threads of one process, or
/// processes; which of the two, the group tells.

#include "core/api/plugins.hpp"
#include "core/api/transport.hpp"
#include "transports/common/rank_memory.hpp"
#include "transports/loopback/processes.hpp"
#include "transports/loopback/threads.hpp"

namespace m2n {
namespace {

class LoopbackTransport final : public Transport {
 public:
  std::string_view name() const noexcept override { return "loopback"; }

  void connect(Group& group, Deadline deadline) override {
    group_ = &group;
    if (group.in_process()) {
      group.barrier("loopback connect", deadline);
    } else {
      loopback::connect_processes(group, deadline);
    }
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(group_ != nullptr, "connect() before prepare()");
    expects(program.rank == group_->rank(), "the program of this rank");
    require_host_memory("transport 'loopback'", buffers);
    return group_->in_process()
               ? loopback::prepare_in_threads(*group_, program, buffers, deadline)
               : loopback::prepare_in_processes(*group_, program, buffers, deadline);
  }

 private:
  Group* group_ = nullptr;
};

}  // namespace

void add_transport_loopback(Registries& registries) {
  registries.transports.add("loopback",
                            "ranks are threads, or processes of one machine; host memory",
                            [](const TransportContext& context) {
                              require_no_options("transport 'loopback'", context.options);
                              return std::make_unique<LoopbackTransport>();
                            });
}

}  // namespace m2n
