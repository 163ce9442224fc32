// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The engine of one trainer rank: sends its shards round after round, to one or more deployments.

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/plugins.hpp"
#include "core/control/control.hpp"
#include "core/engine/engine_options.hpp"
#include "core/engine/link.hpp"
#include "core/engine/requests.hpp"
#include "core/rendezvous/listen_socket.hpp"
#include "core/rendezvous/store_server.hpp"

namespace m2n {

/// Workers that are updated together, behind one control endpoint.
struct DeploymentSpec {
  Rank workers = 1;
  std::vector<Index> dst_mesh_dims;  ///< {replicas, shards}; empty: {workers, 1}.
  /// Used by rank 0 alone; null elsewhere. Cancelled when the trainer fails: another init() needs
  /// another one.
  std::shared_ptr<ControlClient> control;
};

/// Where and with whom a trainer rank joins.
struct TrainerInit {
  std::string master_address = "127.0.0.1";  ///< Rank 0's host, as the others reach it.
  std::uint16_t master_port = 0;
  Rank rank = 0;
  Rank trainers = 1;
  std::vector<DeploymentSpec> deployments = {};  ///< At least one; in the same order everywhere.
  std::string unique_id_b64 = {};                ///< Optional, for transports that take one.
  std::optional<int> max_cta = {};
  std::uint64_t epoch = 1;  ///< Grows with every init() of the job; equal on all ranks.
  /// Rank 0 may bring the port's socket, reserved before. Without one it listens on the port.
  std::optional<ListenSocket> listen_socket = {};
  /// Most names in one update_weights call; 0: all. The last call moves everything: see
  /// WorkerEngine::update().
  std::size_t slice = 0;
  std::uint64_t first_version = 1;
};

/// What rank 0 saw of a round, slowest deployment first where one number stands for all.
struct RoundSummary {
  std::uint64_t version = 0;
  double seconds = 0;                ///< The whole call.
  double borrow_seconds = 0;         ///< The source's part: until it had lent its weights.
  double move_seconds = 0;           ///< The transport's part.
  double integrity_seconds = 0;      ///< Digests and their comparison.
  bool verified = false;             ///< By digests, in every deployment.
  std::vector<RoundReport> reports;  ///< Of this rank, by deployment.
};

/// Order of calls: init(), send_weights() once a round, shutdown(). After an error init() again,
/// with a larger epoch.
///
/// - Collective: all three, by every trainer rank.
/// - Threads: one call at a time.
/// - Memory: the source is a loan from init() to shutdown(); its buffers are read during
///   send_weights() only.
/// - Streams: work that writes the weights is complete when the source's borrow() returns.
/// - Errors: Error. All trainers throw the same text, which names the phase and the ranks at fault;
///   when it comes from one of several deployments it says which, and in what versions the others
///   are. Nothing is left running.
class TrainerEngine final {
 public:
  TrainerEngine(const Registries& registries, EngineOptions options);
  TrainerEngine(const TrainerEngine&) = delete;
  TrainerEngine& operator=(const TrainerEngine&) = delete;
  ~TrainerEngine();

  void init(TrainerInit init, WeightSource& source);

  /// One round: start, update beside the transfer, finish, and the outcome to every trainer. The
  /// caller may change its weights when this returns.
  RoundSummary send_weights();

  /// Leaves the worlds, rank 0 last.
  void shutdown();

  std::uint64_t next_version() const noexcept { return next_version_; }
  const std::string& plan_digest(std::size_t deployment = 0) const {
    return links_.at(deployment)->plan_digest();
  }
  /// What rank 0 sends to the workers of @p deployment: the body of init_weight_transfer_engine.
  InitRequest init_request(std::size_t deployment) const;
  const EngineOptions& options() const noexcept { return options_; }

 private:
  class Beside;

  void check(const TrainerInit& init) const;
  WorldSpec world_of(std::size_t deployment) const;
  void serve();
  void init_link(std::size_t deployment);
  std::chrono::milliseconds call_span() const;
  RoundRequest request_of(const Link& link, std::uint64_t version) const;
  void update(std::size_t deployment, std::uint64_t version);
  void drive(std::uint64_t version, RoundSummary& summary);
  static void take(const LinkRound& round, RoundSummary& summary);
  void publish_outcome(std::string_view phase, std::uint64_t version);
  void receive_outcome(std::string_view phase, std::uint64_t version);
  [[noreturn]] void fail(const std::exception_ptr& error);
  void drop() noexcept;

  const Registries& registries_;
  EngineOptions options_;
  TrainerInit init_;
  WeightSource* source_ = nullptr;
  std::unique_ptr<StoreServer> store_;  // of rank 0
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<char> takes_ranges_;  // [deployment] of rank 0: what its init answered
  std::uint64_t next_version_ = 1;
};

}  // namespace m2n
