// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A session: its parts in the order in which they are made, its rounds, and what is done when a
/// round does not end. See queue.cpp for how a round runs.

#include "transports/nccl/session.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "transports/nccl/compile.hpp"
#include "transports/nccl/links.hpp"
#include "transports/nccl/process.hpp"
#include "transports/nccl/queue.hpp"
#include "transports/nccl/session_memory.hpp"

namespace m2n::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollInterval{10};
constexpr std::chrono::seconds kDrainPatience{5};
/// After a deadline, for a peer that knows better to say whom it waited for.
constexpr std::chrono::milliseconds kBlamePatience{100};

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
      : connection_(std::move(connection)),
        rank_(static_cast<std::size_t>(program.rank)),
        world_(connection_->ranks.size()) {
    expects(static_cast<std::size_t>(program.world_size) <= world_, "a group as large as the plan");
    load_kernels();
    if (!connection_->side) {
      connection_->side = std::make_unique<Stream>();
    }
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
    figures_.device_bytes = memory_->bytes() + device_round_->bytes() + compiled_.staging.bytes() +
                            compiled_.marks.bytes();
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
      compiled_.marks.leak();
    }
  }

  void start(std::uint64_t version, Deadline deadline) override {
    const auto begin = Clock::now();
    const DeviceGuard guard(connection_->device);
    started_ = begin;
    report_.version = version;
    ++round_;
    running_ = true;
    queued([&] { queue_->begin(round_, deadline); });
    figures_.host_seconds = seconds_since(begin);
  }

  RoundReport wait(Deadline deadline) override {
    if (!running_) {
      throw TransportError(Errc::unavailable, "nccl: no round is in progress");
    }
    const DeviceGuard guard(connection_->device);
    HostWords& words = *words_.get();
    auto next_poll = Clock::now() + kPollInterval;
    for (std::uint64_t spin = 0;; ++spin) {
      if (!queue_->complete()) {
        const auto begin = Clock::now();
        bool more = false;
        queued([&] { more = queue_->pump(deadline); });
        if (more) {
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
    queue_->end();
    return report_;
  }

  void abort() noexcept override { give_up(rank_); }

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

  /// Looks for errors that no flag tells: of the library, of the streams, of peers that gave up or
  /// whose processes have ended.
  void poll() {
    if (links_.uses_wire) {
      queued([&] { connection_->comm->poll(); });
    }
    const cudaError_t state = cudaStreamQuery(queue_->main());
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      check(state, "run a round");
    }
    const std::set<std::size_t> behind = behind_ranks();
    if (blamed_ != 0) {
      fail(Errc::peer_lost, "a rank gave up in round " + std::to_string(round_));
    }
    for (const std::size_t rank : behind) {
      if (state_of(rank) == ProcessState::ended && behind_ranks().contains(rank)) {
        fail(Errc::peer_lost, "a process has ended before round " + std::to_string(round_));
      }
    }
  }

  /// Queueing asks the library, which may find that a peer is gone.
  template <class Queue>
  void queued(const Queue& queue) {
    try {
      queue();
    } catch (const TransportError& error) {
      fail(error.code(), std::string(error.what()).substr(sizeof "nccl: " - 1));
    }
  }

  ProcessState state_of(std::size_t rank) const {
    const Identity& other = connection_->ranks[rank];
    return process_state(other.process, other.processes);
  }

  /// Lets every wait of this rank and of the peers that are mapped end. @param rank  Why.
  void give_up(std::size_t rank) noexcept {
    PinnedWords::write(words_.get()->abort, 1);
    cudaSetDevice(connection_->device);
    device_round_->abort(rank, *connection_->side);
  }

  void abort_communicator() {
    if (links_.uses_wire && connection_->comm) {
      connection_->comm->abort();
    }
  }

  [[noreturn]] void fail(Errc code, const std::string& text) {
    std::set<std::size_t> missing = missing_ranks();
    for (const auto until = Clock::now() + kBlamePatience;
         code == Errc::timed_out && blamed_ == 0 && !missing.empty() && Clock::now() < until &&
         std::none_of(missing.begin(), missing.end(), [&](std::size_t r) { return is_idle(r); });
         missing = missing_ranks()) {
      std::this_thread::sleep_for(kPollInterval);
    }
    running_ = false;
    give_up(missing.empty() ? rank_ : *missing.begin());
    abort_communicator();
    queue_->drain(Clock::now() + kDrainPatience);
    std::string names;
    for (const std::size_t rank : missing) {
      const ProcessState state = state_of(rank);
      names += (names.empty() ? "" : ", ") + std::to_string(rank) +
               (state == ProcessState::ended     ? " (ended)"
                : state == ProcessState::stopped ? " (stopped)"
                                                 : "");
    }
    throw TransportError(
        code, "nccl: " + text +
                  (code == Errc::timed_out ? "; ranks missing: " : "; ranks not done: ") +
                  (names.empty() ? "none known" : names));
  }

  /// Who keeps this rank from ending its round, as well as it can tell: whom a peer blames that
  /// gave up before; else of the ranks that are behind, or else of all, those whose processes do
  /// not run; else those that are behind.
  std::set<std::size_t> missing_ranks() {
    std::set<std::size_t> missing;
    try {
      missing = behind_ranks();
    } catch (const TransportError&) {
      return {};  // the device is of no use any more
    }
    if (blamed_ != 0 && blamed_ - 1 != rank_ && blamed_ <= world_) {
      return {blamed_ - 1};
    }
    if (missing.empty() && links_.uses_wire) {
      for (const PeerTraffic& traffic : report_.peers) {
        missing.insert(static_cast<std::size_t>(traffic.peer));
      }
    }
    std::set<std::size_t> idle = idle_ranks(missing);
    if (idle.empty()) {  // who is behind may wait for one that fell when it was done with this rank
      std::set<std::size_t> all;
      for (std::size_t rank = 0; rank < world_; ++rank) {
        all.insert(rank);
      }
      all.erase(rank_);
      idle = idle_ranks(all);
    }
    return idle.empty() ? missing : idle;
  }

  bool is_idle(std::size_t rank) const {
    const ProcessState state = state_of(rank);
    return state == ProcessState::ended || state == ProcessState::stopped;
  }

  std::set<std::size_t> idle_ranks(const std::set<std::size_t>& among) const {
    std::set<std::size_t> idle;
    std::copy_if(among.begin(), among.end(), std::inserter(idle, idle.end()),
                 [&](std::size_t rank) { return is_idle(rank); });
    return idle;
  }

  /// Ranks whose flags or marks are behind. Also reads whom a peer blames.
  std::set<std::size_t> behind_ranks() {
    const std::size_t head = sizeof(ControlHead) / sizeof(std::uint64_t);
    std::vector<std::uint64_t> block(head + 2 * world_);
    std::vector<std::uint64_t> marks(compiled_.marked.size());
    const auto read = [&](std::vector<std::uint64_t>& to, const DeviceMemory& from) {
      check(cudaMemcpyAsync(to.data(), from.data(), to.size() * sizeof to[0],
                            cudaMemcpyDeviceToHost, *connection_->side),
            "look for ranks that are behind");
    };
    read(block, memory_->control());
    read(marks, compiled_.marks);
    check(cudaStreamSynchronize(*connection_->side), "look for ranks that are behind");
    blamed_ = block[offsetof(ControlHead, abort) / sizeof(std::uint64_t)];
    std::set<std::size_t> behind;
    for (const Gate& gate : compiled_.gates) {
      if (block[head + gate.flag] < round_ * control_.stride + gate.add) {
        behind.insert(gate.flag % world_);
      }
    }
    for (std::size_t i = 0; i < marks.size(); ++i) {
      if (marks[i] < round_) {
        behind.insert(compiled_.marked[i]);
      }
    }
    return behind;
  }

  std::shared_ptr<Connection> connection_;
  std::size_t rank_;
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
  std::uint64_t blamed_ = 0;  // 1 + a rank; 0: no peer has given up
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
