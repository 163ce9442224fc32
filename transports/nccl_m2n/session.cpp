// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A round is one reshard call a parameter, in plan order, on one stream; or group calls over all
/// of them. The calls are made on a thread of their own, because some wait for other ranks without
/// a limit. What the library is stuck in is left to the process: by its own word nothing can be
/// done with the communicator after an error.

#include "transports/nccl_m2n/session.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "transports/common/agree.hpp"
#include "transports/nccl_common/called_session.hpp"
#include "transports/nccl_m2n/calls.hpp"
#include "transports/nccl_m2n/log.hpp"

namespace m2n::nccl_m2n {
namespace {

using nccl::check;
using nccl::DeviceGuard;

std::uint64_t free_device_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "ask for free memory");
  return free;
}

/// Bytes that went from @p before to what is free now.
std::uint64_t taken_since(std::uint64_t before) {
  const std::uint64_t now = free_device_bytes();
  return before > now ? before - now : 0;
}

/// One round's calls.
class Round final : public nccl::StreamWork {
 public:
  explicit Round(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  void run() override {
    calls.queue(*connection_->library, connection_->runtime->handle(), connection_->comm->handle(),
                connection_->options.grouped, stream);
  }

  Calls calls;

 private:
  std::shared_ptr<Connection> connection_;
};

class M2nSession final : public nccl::CalledSession {
 public:
  M2nSession(std::shared_ptr<Connection> connection, const Program& program, const Buffers& buffers,
             Deadline deadline)
      : CalledSession("nccl_m2n", connection->device, connection->options.stream,
                      connection->thread),
        connection_(std::move(connection)) {
    if (connection_->broken) {
      throw TransportError(Errc::peer_lost,
                           "nccl_m2n: a call failed before, and NVIDIA's library cannot go on");
    }
    std::vector<Form> forms;
    agree(group(), "nccl_m2n parameters", error_of([&] {
            forms = express_all(program);
            place(program, forms, buffers);
          }),
          deadline);
    require_equal_settings(program, deadline);
    start_runtime(forms, deadline);
    report_traffic(program.rank, forms);
    group().barrier("nccl_m2n prepare", deadline);
  }

  ~M2nSession() override { finish(); }

  /// The library's memory serves all sessions of the connection.
  std::optional<std::uint64_t> extra_bytes() const override {
    return connection_->taken_bytes + buffers_.mirror_bytes();
  }

 private:
  Group& group() const { return *connection_->group; }

  void poll() override { connection_->comm->poll(); }

  void give_up() noexcept override {
    connection_->broken = true;
    if (connection_->runtime) {
      connection_->runtime->leak();
    }
    connection_->comm->abort();
  }

  void round_over() override {
    if (!counted_) {  // some of the library's memory comes with the first large tensor
      counted_ = true;
      connection_->taken_bytes += taken_since(free_before_);
    }
  }

  std::vector<Form> express_all(const Program& program) const {
    if (program.problem == nullptr) {
      throw Error(Errc::bad_argument,
                  std::string(kWho) +
                      " needs the layouts of what it moves, and this program has "
                      "no problem; expected one of make_program()");
    }
    const Caps caps = connection_->options.caps(connection_->one_host);
    std::vector<Form> forms;
    for (const std::uint32_t parameter : program.parameters) {
      forms.push_back(express(*program.problem, parameter, caps));
    }
    return forms;
  }

  void place(const Program& program, const std::vector<Form>& forms, const Buffers& buffers) {
    const auto round = std::make_shared<Round>(connection_);
    round_ = round;
    buffers_ = nccl::DeviceBuffers(kWho, program.rank, buffers, connection_->device);
    for (const Form& form : forms) {
      const std::string& name = program.problem->parameters()[form.parameter].name;
      const auto address = [&](Role role, const SideForm& side) {
        if (!side.holds(program.rank)) {
          return std::uint64_t{0};
        }
        const LocalPlace at = local_place(*program.problem, form.parameter, role, program.rank);
        const std::uint64_t base =
            role == Role::source ? buffers_.source(at.buffer) : buffers_.destination(at.buffer);
        if (base == 0) {
          throw Error(Errc::bad_argument, std::string(kWho) + ": rank " +
                                              std::to_string(program.rank) +
                                              " lends no memory for parameter '" + name +
                                              "', of which it holds a part");
        }
        return base + at.offset_bytes;
      };
      round->calls.add(form, name, address(Role::source, form.source),
                       address(Role::destination, form.destination));
    }
  }

  void require_equal_settings(const Program& program, Deadline deadline) {
    const std::string mine = connection_->options.shared() + " plan=" + program.plan_digest;
    const auto all = group().all_gather("nccl_m2n settings", mine, deadline);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] != all[0]) {
        throw TransportError(Errc::bad_argument,
                             std::string(kWho) + ": rank " + std::to_string(rank) + " runs with " +
                                 all[rank] + ", expected " + all[0] + " as on rank 0");
      }
    }
  }

  // ---------------------------------------------------------------- the library's runtime

  /// One form of each pattern.
  std::vector<Form> miniatures(const std::vector<Form>& forms) const {
    std::vector<Form> out;
    std::set<std::string> seen;
    for (const Form& form : forms) {
      if (seen.insert(form.pattern()).second) {
        out.push_back(form.miniature());
      }
    }
    return out;
  }

  /// Has the library show its path for patterns that are new, and then makes it ready: it takes its
  /// memory and links the ranks in its first calls, which move a few bytes of our own.
  void start_runtime(const std::vector<Form>& forms, Deadline deadline) {
    const std::vector<Form> small = miniatures(forms);
    const bool known = std::all_of(small.begin(), small.end(), [&](const Form& form) {
      return connection_->paths.contains(form.pattern());
    });
    if (!known) {
      connection_->runtime.reset();
      group().barrier("nccl_m2n before the log", deadline);
      {
        const LogCapture capture;
        make_runtime(true, deadline);
        for (const Form& form : small) {
          const std::string before = capture.text();
          run_miniatures({form}, deadline);
          group().barrier("nccl_m2n logged", deadline);
          connection_->paths[form.pattern()] = path_in_log(
              capture.text().substr(before.size()), group().rank(), connection_->options.path);
          group().barrier("nccl_m2n read", deadline);
        }
        connection_->runtime.reset();
      }
      group().barrier("nccl_m2n after the log", deadline);
    }
    if (!connection_->runtime) {
      const std::uint64_t before = free_device_bytes();
      make_runtime(false, deadline);
      run_miniatures(small, deadline);
      group().barrier("nccl_m2n warm", deadline);
      connection_->taken_bytes = taken_since(before);
    }
    free_before_ = free_device_bytes();
  }

  void make_runtime(bool logs, Deadline deadline) {
    agree(group(), "nccl_m2n runtime", error_of([&] {
            connection_->runtime = std::make_unique<Runtime>(
                connection_->library, connection_->thread, connection_->options, logs);
          }),
          deadline);
  }

  /// Groups of one tensor go another way than larger ones, so that each is run twice.
  void run_miniatures(const std::vector<Form>& small, Deadline deadline) {
    const auto trial = std::make_shared<Round>(connection_);
    std::vector<nccl::DeviceMemory> memory;
    const Rank rank = group().rank();
    for (const Form& form : small) {
      std::uint64_t bytes = 1;
      for (const std::size_t extent : form.shape) {
        bytes *= extent;
      }
      for (int copy = 0; copy < 2; ++copy) {
        memory.emplace_back(bytes);
        const auto at = reinterpret_cast<std::uint64_t>(memory.back().data());
        trial->calls.add(form, "a trial of pattern " + form.pattern(),
                         form.source.holds(rank) ? at : 0, form.destination.holds(rank) ? at : 0);
      }
    }
    agree(group(), "nccl_m2n trial", error_of([&] {
            try {
              run_now(trial, "make its first calls", deadline);
            } catch (const Error&) {
              for (nccl::DeviceMemory& left : memory) {
                left.leak();
              }
              give_up();
              throw;
            }
          }),
          deadline);
  }

  void report_traffic(Rank rank, const std::vector<Form>& forms) {
    std::map<Rank, PeerTraffic> peers;
    std::map<Rank, std::set<std::string>> paths;
    std::map<std::pair<Rank, Rank>, std::uint64_t> traffic;
    for (const Form& form : forms) {
      traffic.clear();
      add_traffic(form, traffic);
      for (const auto& [pair, bytes] : traffic) {
        if (pair.first != rank && pair.second != rank) {
          continue;
        }
        const bool sends = pair.first == rank;
        const Rank other = sends ? pair.second : pair.first;
        PeerTraffic& peer = peers[other];
        peer.peer = other;
        (sends ? peer.sent_bytes : peer.received_bytes) += bytes;
        paths[other].insert(connection_->paths[form.pattern()]);
      }
    }
    for (auto& [other, peer] : peers) {
      for (const std::string& path : paths[other]) {
        peer.path += (peer.path.empty() ? "" : "+") + path;
      }
      report_.peers.push_back(peer);
    }
  }

  std::shared_ptr<Connection> connection_;
  std::uint64_t free_before_ = 0;
  bool counted_ = false;
};

}  // namespace

std::unique_ptr<Session> make_session(std::shared_ptr<Connection> connection,
                                      const Program& program, const Buffers& buffers,
                                      Deadline deadline) {
  const DeviceGuard guard(connection->device);
  return std::make_unique<M2nSession>(std::move(connection), program, buffers, deadline);
}

}  // namespace m2n::nccl_m2n
