// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_reference/session.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "transports/common/agree.hpp"
#include "transports/nccl/arena.hpp"
#include "transports/nccl_reference/round.hpp"
#include "transports/nccl_reference/schedule.hpp"

namespace m2n::nccl_reference {
namespace {

using nccl::check;
using nccl::DeviceGuard;

/// Memory that NCCL knows, for as long as this lives.
class Registrations {
 public:
  explicit Registrations(ncclComm_t comm) : comm_(comm) {}
  ~Registrations() {
    for (void* const handle : handles_) {
      ncclCommDeregister(comm_, handle);
    }
  }
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  /// What NCCL cannot register moves as it does without.
  void add(std::uint64_t base, std::uint64_t bytes) {
    void* handle = nullptr;
    if (ncclCommRegister(comm_, reinterpret_cast<void*>(base), bytes, &handle) == ncclSuccess &&
        handle != nullptr) {
      handles_.push_back(handle);
    }
  }
  /// The communicator is gone.
  void forget() { handles_.clear(); }

 private:
  ncclComm_t comm_;
  std::vector<void*> handles_;
};

class ReferenceSession final : public nccl::CalledSession {
 public:
  ReferenceSession(std::shared_ptr<Connection> connection, const Program& program,
                   const Buffers& buffers, Deadline deadline)
      : CalledSession("nccl_reference", connection->device, connection->options.stream,
                      connection->thread),
        connection_(std::move(connection)),
        made_(std::make_shared<Round>()) {
    round_ = made_;
    Schedule schedule;
    agree(group(), "nccl_reference program", error_of([&] {
            schedule = make_schedule(program);
            buffers_ = nccl::DeviceBuffers("transport 'nccl_reference'", program.rank, buffers,
                                           connection_->device);
            take_memory(schedule);
            compile(schedule);
          }),
          deadline);
    require_equal_settings(program, deadline);
    connect_members(schedule, deadline);
    made_->world = connection_->comm->handle();
    if (options().registered) {
      register_memory(deadline);
    }
    report_traffic(schedule, program.rank);
    group().barrier("nccl_reference prepare", deadline);
  }

  ~ReferenceSession() override {
    finish();
    if (connection_->comm->aborted()) {
      forget_registrations();
    }
  }

  std::optional<std::uint64_t> extra_bytes() const override {
    return memory_bytes_ + made_->table.bytes() + buffers_.mirror_bytes();
  }

 private:
  Group& group() const { return *connection_->group; }
  const ReferenceOptions& options() const { return connection_->options; }

  void poll() override {
    connection_->comm->poll();
    if (members_) {
      members_->poll();
    }
  }

  void forget_registrations() noexcept {
    for (const auto& registrations : registrations_) {
      registrations->forget();
    }
  }

  void give_up() noexcept override {
    forget_registrations();
    if (members_) {
      members_->abort();
    }
    connection_->comm->abort();
    static_cast<void>(memory_.release());  // a stream may still use it
    made_->table.leak();
  }

  Schedule make_schedule(const Program& program) const {
    switch (options().method) {
      case Method::packed:
        return by_broadcast(program, options().pack_bytes);
      case Method::broadcast:
        return by_broadcast(program, 0);
      case Method::group:
        return by_messages(program, false);
      case Method::calls:
        break;
    }
    return by_messages(program, true);
  }

  void take_memory(const Schedule& schedule) {
    full_ = 0;
    outgoing_ = full_ + kSlots * aligned(schedule.full_bytes);
    incoming_ = outgoing_ + kSlots * aligned(schedule.outgoing_bytes);
    scratch_ = incoming_ + kSlots * aligned(schedule.incoming_bytes);
    memory_bytes_ = scratch_ + aligned(schedule.scratch_bytes);
    memory_ = std::make_unique<nccl::DeviceArena>(connection_->device, memory_bytes_);
    for (std::uint64_t* const area : {&full_, &outgoing_, &incoming_, &scratch_}) {
      *area += reinterpret_cast<std::uint64_t>(memory_->data());
    }
  }

  std::uint64_t address(const Schedule& schedule, const Place& place, std::size_t slot) const {
    std::uint64_t base = 0;
    switch (place.area) {
      case Area::source:
        base = buffers_.source(place.buffer);
        expects(base != 0, "a buffer for every source piece of the program");
        break;
      case Area::destination:
        base = buffers_.destination(place.buffer);
        expects(base != 0, "a buffer for every destination piece of the program");
        break;
      case Area::scratch:
        base = scratch_;
        break;
      case Area::full:
        base = full_ + slot * aligned(schedule.full_bytes);
        break;
      case Area::outgoing:
        base = outgoing_ + slot * aligned(schedule.outgoing_bytes);
        break;
      case Area::incoming:
        base = incoming_ + slot * aligned(schedule.incoming_bytes);
        break;
    }
    return base + place.offset_bytes;
  }

  void compile(const Schedule& schedule) {
    std::vector<Run> runs;
    for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
      const Step& step = schedule.steps[i];
      const std::size_t slot = i % kSlots;
      const auto at = [&](const Place& place) { return address(schedule, place, slot); };
      const auto copies = [&](const std::vector<Copy>& list, bool fused) {
        Copies out;
        RunList all{runs.size(), 0, 0};
        for (const Copy& copy : list) {
          RunList alone{runs.size(), 0, 0};
          append_runs(copy.copy, at(copy.from), at(copy.to), runs, fused ? all : alone);
          if (fused || alone.count == 0) {
            continue;
          }
          if (const Run& run = runs.back(); alone.count == 1 && run.rows == 1) {
            out.plain.push_back({run.source, run.destination, run.row_bytes});
            runs.pop_back();
          } else {
            out.lists.push_back(alone);
          }
        }
        if (fused && all.count > 0) {
          out.lists.push_back(all);
        }
        return out;
      };
      ReadyStep ready;
      ready.barrier = step.barrier;
      ready.pack = copies(step.pack, true);
      for (const Transfer& t : step.sends) {
        ready.sends.push_back({t.peer, at(t.at), t.bytes});
      }
      for (const Transfer& t : step.receives) {
        ready.receives.push_back({t.peer, at(t.at), t.bytes});
      }
      ready.gather = copies(step.gather, true);
      ready.broadcast_bytes = step.broadcast_bytes;
      if (step.broadcast_bytes > 0) {
        ready.whole = at(step.whole);
      }
      ready.unpack = copies(step.unpack, options().fused_unpack);
      ready.slot = uses_slot(step);
      made_->steps.push_back(std::move(ready));
    }
    made_->table = nccl::DeviceMemory(runs.size() * sizeof(Run));
    if (!runs.empty()) {
      check(cudaMemcpy(made_->table.data(), runs.data(), made_->table.bytes(),
                       cudaMemcpyHostToDevice),
            "upload the list of copies");
    }
  }

  static bool uses_slot(const Step& step) {
    const auto in_slot = [](const Place& place) {
      return place.area == Area::full || place.area == Area::outgoing ||
             place.area == Area::incoming;
    };
    const auto any_copy = [&](const std::vector<Copy>& list) {
      return std::any_of(list.begin(), list.end(),
                         [&](const Copy& copy) { return in_slot(copy.from) || in_slot(copy.to); });
    };
    const auto any_transfer = [&](const std::vector<Transfer>& list) {
      return std::any_of(list.begin(), list.end(),
                         [&](const Transfer& transfer) { return in_slot(transfer.at); });
    };
    return any_copy(step.pack) || any_copy(step.gather) || any_copy(step.unpack) ||
           any_transfer(step.sends) || any_transfer(step.receives) ||
           (step.broadcast_bytes > 0 && in_slot(step.whole));
  }

  void require_equal_settings(const Program& program, Deadline deadline) {
    const std::string mine = options().shared() + " plan=" + program.plan_digest;
    const auto all = group().all_gather("nccl_reference settings", mine, deadline);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] != all[0]) {
        throw TransportError(Errc::bad_argument, "nccl_reference: rank " + std::to_string(rank) +
                                                     " runs with " + all[rank] + ", expected " +
                                                     all[0] + " as on rank 0");
      }
    }
  }

  void connect_members(const Schedule& schedule, Deadline deadline) {
    if (schedule.root < 0) {
      return;
    }
    const bool member = std::binary_search(schedule.members.begin(), schedule.members.end(),
                                           static_cast<Rank>(group().rank()));
    members_ = std::make_unique<nccl::PlainCommunicator>(*connection_->comm, member, deadline);
    made_->members = members_->handle();
    made_->root = static_cast<int>(
        std::lower_bound(schedule.members.begin(), schedule.members.end(), schedule.root) -
        schedule.members.begin());
  }

  void register_memory(Deadline deadline) {
    std::map<std::uint64_t, std::uint64_t> allocations;  // base -> bytes
    const auto note = [&](std::uint64_t at) {
      const nccl::Allocation a =
          nccl::allocation_of(reinterpret_cast<const void*>(at), "a buffer to register");
      allocations[a.base] = a.bytes;
    };
    for (const ReadyStep& step : made_->steps) {
      for (const auto* list : {&step.sends, &step.receives}) {
        for (const auto& message : *list) {
          note(message.address);
        }
      }
      if (step.broadcast_bytes > 0) {
        note(step.whole);
      }
    }
    connection_->thread->run(
        [&] {
          for (const ncclComm_t comm : {made_->world, made_->members}) {
            if (comm == nullptr) {
              continue;
            }
            registrations_.push_back(std::make_unique<Registrations>(comm));
            for (const auto& [base, bytes] : allocations) {
              registrations_.back()->add(base, bytes);
            }
          }
        },
        "register memory", deadline);
  }

  void report_traffic(const Schedule& schedule, Rank rank) {
    std::map<Rank, PeerTraffic> peers;
    for (const auto& [pair, bytes] : schedule.traffic) {
      const bool sends = pair.first == rank;
      const Rank other = sends ? pair.second : pair.first;
      PeerTraffic& peer = peers[other];
      peer.peer = other;
      peer.path = to_string(options().method);
      (sends ? peer.sent_bytes : peer.received_bytes) += bytes;
    }
    for (const auto& [other, peer] : peers) {
      report_.peers.push_back(peer);
    }
    report_.copied_bytes = schedule.copied_bytes;
  }

  std::shared_ptr<Connection> connection_;
  std::shared_ptr<Round> made_;
  std::unique_ptr<nccl::PlainCommunicator> members_;
  std::unique_ptr<nccl::DeviceArena> memory_;
  std::uint64_t memory_bytes_ = 0;
  std::uint64_t full_ = 0;
  std::uint64_t outgoing_ = 0;
  std::uint64_t incoming_ = 0;
  std::uint64_t scratch_ = 0;
  std::vector<std::unique_ptr<Registrations>> registrations_;
};

}  // namespace

std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline) {
  const DeviceGuard guard(connection->device);
  return std::make_unique<ReferenceSession>(std::move(connection), program, buffers, deadline);
}

}  // namespace m2n::nccl_reference
