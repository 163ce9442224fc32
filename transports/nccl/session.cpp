// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A session: its parts in the order in which they are made, its rounds, and what is done when a
/// round does not end. See queue.cpp for how a round runs.

#include "transports/nccl/session.hpp"

#include <map>
#include <set>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "transports/nccl/compile.hpp"
#include "transports/nccl/links.hpp"
#include "transports/nccl/queue.hpp"
#include "transports/nccl/session_memory.hpp"

namespace m2n::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollInterval{10};
constexpr std::chrono::seconds kDrainPatience{5};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// What a round of @p program moves, by the path of every peer.
RoundReport report_of(const Program& program, const Links& links) {
  RoundReport report;
  std::map<std::size_t, PeerTraffic> peers;
  std::map<std::size_t, std::set<std::string>> paths;
  for (const Region& region : program.sends) {
    const auto to = static_cast<std::size_t>(region.to.rank);
    peers[to].sent_bytes += region.bytes;
    paths[to].insert(to_string(links.to.at(to)));
  }
  for (const Region& region : program.receives) {
    const auto from = static_cast<std::size_t>(region.from.rank);
    peers[from].received_bytes += region.bytes;
    paths[from].insert(to_string(links.from.at(from)));
  }
  for (auto& [peer, traffic] : peers) {
    traffic.peer = static_cast<Rank>(peer);
    for (const std::string& path : paths[peer]) {
      traffic.path += (traffic.path.empty() ? "" : "+") + path;
    }
    if (traffic.sent_bytes + traffic.received_bytes > 0) {
      report.peers.push_back(traffic);
    }
  }
  for (const Region& region : program.copies) {
    report.copied_bytes += region.bytes;
  }
  return report;
}

class NcclSession final : public Session {
 public:
  NcclSession(std::shared_ptr<Connection> connection, const Program& program,
              const Buffers& buffers, Deadline deadline)
      : connection_(std::move(connection)), world_(connection_->ranks.size()) {
    expects(static_cast<std::size_t>(program.world_size) <= world_, "a group as large as the plan");
    load_kernels();
    const auto place = [&]() -> const SessionMemory& {
      memory_ = std::make_unique<SessionMemory>(program, buffers, connection_->device, world_);
      return *memory_;
    };
    links_ = link_ranks(*connection_, program, place, deadline);
    compiled_ = compile(program, *memory_, links_, connection_->options, world_);
    device_round_ = std::make_unique<DeviceRound>(compiled_, links_);
    set_up_control();
    queue_ = std::make_unique<RoundQueue>(*connection_, *memory_, links_, compiled_, *device_round_,
                                          control_);
    figures_.device_bytes = memory_->bytes() + device_round_->bytes() + compiled_.staging.bytes();
    figures_.table_bytes = device_round_->bytes();
    figures_.engine_copies = compiled_.engine_copies;
    figures_.list_tasks = compiled_.tables.tasks.size();
    report_ = report_of(program, links_);
    connection_->group->barrier("nccl prepare", deadline);
  }

  ~NcclSession() override {
    cudaSetDevice(connection_->device);
    if (running_) {
      abort();
      abort_communicator();
    }
    if (!queue_->drain(Clock::now() + kDrainPatience)) {
      memory_->control().leak();
      device_round_->leak();
      compiled_.staging.leak();
    }
  }

  void start(std::uint64_t version, Deadline deadline) override {
    const auto begin = Clock::now();
    const DeviceGuard guard(connection_->device);
    started_ = begin;
    report_.version = version;
    ++round_;
    running_ = true;
    queue_->begin(round_, deadline);
    figures_.host_seconds = seconds_since(begin);
  }

  RoundReport wait(Deadline deadline) override {
    const DeviceGuard guard(connection_->device);
    HostWords& words = *words_.get();
    auto next_poll = Clock::now() + kPollInterval;
    for (std::uint64_t spin = 0;; ++spin) {
      if (!queue_->complete()) {
        const auto begin = Clock::now();
        if (queue_->pump(deadline)) {
          figures_.host_seconds += seconds_since(begin);
        }
      } else if (PinnedWords::read(words.finished) == round_) {
        break;
      }
      if (PinnedWords::read(words.failed) != 0) {
        fail(Errc::peer_lost, "a rank gave up in round " + std::to_string(round_));
      }
      const auto now = Clock::now();
      if (now > deadline) {
        fail(Errc::timed_out, "the deadline passed in round " + std::to_string(round_));
      }
      if (now > next_poll) {
        next_poll = now + kPollInterval;
        poll();
      } else if (spin > 2000) {
        std::this_thread::yield();
      }
    }
    if (memory_->has_mirrors()) {
      memory_->copy_out(queue_->main());
      check(cudaStreamSynchronize(queue_->main()), "copy buffers to the host");
    }
    running_ = false;
    report_.seconds = seconds_since(started_);
    return report_;
  }

  void abort() noexcept override {
    PinnedWords::write(words_.get()->abort, 1);
    cudaSetDevice(connection_->device);
    device_round_->abort(queue_->side());
  }

  std::optional<std::uint64_t> extra_bytes() const override { return figures_.device_bytes; }

  SessionFigures figures() const { return figures_; }

 private:
  void set_up_control() {
    std::byte* block = memory_->control().data();
    control_.head = reinterpret_cast<ControlHead*>(block);
    control_.flags = reinterpret_cast<volatile std::uint64_t*>(block + sizeof(ControlHead));
    control_.host = words_.get();
    control_.stride = compiled_.stride;
    const std::uint64_t first_round = 1;
    check(
        cudaMemcpy(&control_.head->round, &first_round, sizeof first_round, cudaMemcpyHostToDevice),
        "set up the control block");
  }

  /// Looks for errors that no flag tells: of the library, of the streams, of peers that gave up.
  void poll() {
    if (links_.uses_wire) {
      try {
        connection_->comm->poll();
      } catch (const TransportError& error) {
        fail(error.code(), std::string(error.what()).substr(sizeof "nccl: " - 1));
      }
    }
    const cudaError_t state = cudaStreamQuery(queue_->main());
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      check(state, "run a round");
    }
    check(cudaMemcpyAsync(&peer_abort_, &control_.head->abort, sizeof peer_abort_,
                          cudaMemcpyDeviceToHost, queue_->side()),
          "look for peers that gave up");
    if (cudaStreamSynchronize(queue_->side()) == cudaSuccess && peer_abort_ != 0) {
      fail(Errc::peer_lost, "a rank gave up in round " + std::to_string(round_));
    }
  }

  void abort_communicator() {
    if (links_.uses_wire && connection_->comm) {
      connection_->comm->abort();
    }
  }

  [[noreturn]] void fail(Errc code, const std::string& text) {
    std::string missing = missing_ranks();
    abort();
    abort_communicator();
    if (links_.uses_wire && missing.empty()) {
      for (const PeerTraffic& traffic : report_.peers) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(traffic.peer);
      }
      missing = "unknown, any of " + missing;
    }
    queue_->drain(Clock::now() + kDrainPatience);
    throw TransportError(
        code, "nccl: " + text +
                  (code == Errc::timed_out ? "; ranks missing: " : "; ranks not done: ") +
                  (missing.empty() ? "none known" : missing));
  }

  /// Ranks whose flags are behind.
  std::string missing_ranks() {
    std::vector<std::uint64_t> flags(2 * world_);
    if (cudaMemcpyAsync(flags.data(), const_cast<const std::uint64_t*>(control_.flags),
                        flags.size() * sizeof flags[0], cudaMemcpyDeviceToHost,
                        queue_->side()) != cudaSuccess ||
        cudaStreamSynchronize(queue_->side()) != cudaSuccess) {
      return "";
    }
    std::set<std::size_t> behind;
    for (const Gate& gate : compiled_.gates) {
      if (flags[gate.flag] < round_ * control_.stride + gate.add) {
        behind.insert(gate.flag % world_);
      }
    }
    std::string text;
    for (const std::size_t rank : behind) {
      text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
  }

  std::shared_ptr<Connection> connection_;
  std::size_t world_;
  std::unique_ptr<SessionMemory> memory_;
  PinnedWords words_;
  Links links_;
  CompiledRound compiled_;
  std::unique_ptr<DeviceRound> device_round_;
  Control control_;
  std::unique_ptr<RoundQueue> queue_;

  // The round in progress.
  std::uint64_t round_ = 0;
  bool running_ = false;
  Clock::time_point started_;
  std::uint64_t peer_abort_ = 0;
  RoundReport report_;
  SessionFigures figures_;
};

}  // namespace

SessionFigures figures_of(const Session& session) {
  const auto* own = dynamic_cast<const NcclSession*>(&session);
  expects(own != nullptr, "a session of transport 'nccl'");
  return own->figures();
}

std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline) {
  const DeviceGuard guard(connection->device);
  return std::make_unique<NcclSession>(std::move(connection), program, buffers, deadline);
}

}  // namespace m2n::nccl
