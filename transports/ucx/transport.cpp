// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "ucx": between processes of one machine or of many, over UCX.

#include "core/api/transport.hpp"
#include "core/api/plugins.hpp"
#include "transports/common/agree.hpp"
#include "transports/ucx/session.hpp"

namespace m2n {
namespace {

constexpr std::string_view kWho = "transport 'ucx'";

class UcxTransport final : public Transport {
 public:
  UcxTransport(const ucx::UcxOptions& options, std::optional<int> device)
      : options_(options), device_(device) {}

  std::string_view name() const noexcept override { return "ucx"; }

  bool moves(MemorySpace /*space*/) const noexcept override { return true; }

  void connect(Group& group, Deadline deadline) override {
    const auto error = error_of([&] {
      worker_ = std::make_shared<ucx::Worker>(options_, group.rank(), device_);
      contact_ = worker_->contact().text();
    });
    // Connecting begins with a word from every rank, so that one that never comes is named.
    agree(group, "ucx connect", error, deadline);
    const auto texts = group.all_gather("ucx contacts", contact_, deadline);
    const auto settings = group.all_gather(
        "ucx settings", worker_->context()->settings() + " " + options_.shared(), deadline);
    for (std::size_t rank = 1; rank < settings.size(); ++rank) {
      if (settings[rank] != settings[0]) {
        throw TransportError(Errc::unavailable, std::string(kWho) + ": rank " +
                                                    std::to_string(rank) + " has " +
                                                    settings[rank] + ", rank 0 has " + settings[0] +
                                                    "; they must be equal");
      }
    }
    std::vector<ucx::Contact> contacts;
    for (const std::string& text : texts) {
      contacts.push_back(ucx::Contact::parse(text));
    }
    worker_->set_contacts(std::move(contacts));
    group_ = &group;
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers& buffers,
                                   Deadline deadline) override {
    expects(group_ != nullptr, "connect() before prepare()");
    expects(program.rank == group_->rank(), "the program of this rank");
    std::unique_ptr<ucx::UcxSession> session;
    ++sessions_;
    const auto error = error_of([&] {
      session = std::make_unique<ucx::UcxSession>(worker_, sessions_, options_, program, buffers,
                                                  group_->size());
      session->open(program);
    });
    agree(*group_, "ucx prepare", error, deadline);
    const auto digests = group_->all_gather("ucx plan", program.plan_digest, deadline);
    for (std::size_t rank = 1; rank < digests.size(); ++rank) {
      if (digests[rank] != digests[0]) {
        throw TransportError(Errc::bad_plan, std::string(kWho) + ": rank " + std::to_string(rank) +
                                                 " runs another plan than rank 0; every rank must "
                                                 "plan the same problem");
      }
    }
    session->connect(program, deadline);
    return session;
  }

 private:
  ucx::UcxOptions options_;
  std::optional<int> device_;
  std::shared_ptr<ucx::Worker> worker_;
  std::string contact_;
  Group* group_ = nullptr;
  std::uint32_t sessions_ = 0;
};

}  // namespace

void add_transport_ucx(Registries& registries) {
  registries.transports.add("ucx",
                            "processes of one machine or of many; device memory through staging",
                            [](const TransportContext& context) {
                              return std::make_unique<UcxTransport>(
                                  ucx::UcxOptions::parse(context.options), context.device);
                            });
}

}  // namespace m2n
