// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What trainer and worker engines are told apart from the weights, and the names of their phases.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/api/group.hpp"
#include "core/api/registry.hpp"
#include "core/engine/events.hpp"
#include "core/engine/round.hpp"
#include "core/plan/topology.hpp"

namespace m2n {

struct Registries;

/// Steps of init, in their order, then those of a round. Every rank passes them together; errors
/// name them.
namespace phases {
inline constexpr std::string_view kRendezvous = "rendezvous";
inline constexpr std::string_view kSource = "source agreement";
inline constexpr std::string_view kDestination = "destination agreement";
inline constexpr std::string_view kDataPlane = "data-plane agreement";
inline constexpr std::string_view kRuntime = "runtime ready";
inline constexpr std::string_view kCommunicator = "communicator";
inline constexpr std::string_view kPlan = "complete plan";
inline constexpr std::string_view kRound = "round start";
inline constexpr std::string_view kMove = "move";
inline constexpr std::string_view kIntegrity = "integrity";
inline constexpr std::string_view kAccept = "accept";    ///< Workers check what has come.
inline constexpr std::string_view kFinish = "finish";    ///< Workers commit.
inline constexpr std::string_view kOutcome = "outcome";  ///< Trainers hear of it.
inline constexpr std::string_view kDeploymentCommand = "deployment command";
inline constexpr std::string_view kDeploymentResult = "deployment result";
}  // namespace phases

/// A plain value. What must be equal on all ranks is compared in the data-plane agreement.
struct EngineOptions {
  std::string planner = "direct";
  Options planner_options;
  /// Empty: default_transport() between processes. Ranks that are threads of one process take
  /// "loopback".
  std::string transport;
  Options transport_options;
  Topology topology;   ///< Without islands: one island of the world's size.
  RoundLimits limits;  ///< Of full tensors on their way into load_weights().
  bool verify = true;  ///< Compare the digests of trainers and workers after every round.
  /// Settings of this process that must be equal everywhere, e.g. NCCL_CUMEM_ENABLE.
  std::map<std::string, std::string> environment;

  /// Of this rank's weights, for the transport; nothing where they live in host memory.
  std::optional<int> device = {};
  std::string token;                           ///< Shared secret of the rendezvous.
  std::chrono::milliseconds deadline{60'000};  ///< Of each phase.
  /// Of single phases, where they differ from deadline.
  std::map<std::string, std::chrono::milliseconds, std::less<>> phase_deadlines;

  /// May be empty. See Event for the threads.
  EventSink on_event;
  /// Called when this rank enters a phase, in the thread that does; what it throws is an error of
  /// this rank in this phase. May be empty.
  std::function<void(std::string_view phase)> on_phase;
  /// Of workers: makes the engine forget what it computed with other weights (KV and prefix
  /// caches). Called in finish, in the thread that does, after everything of @p version was
  /// accepted and right before it is committed. What it throws fails the finish as a failed commit
  /// does. Must not call the WorkerEngine. A sink that serves the old version until the commit may
  /// be read meanwhile: the engine admits no request until finish has returned, or keys what it
  /// caches by version. May be empty: then finish answers that caches are unsupported.
  std::function<void(std::uint64_t version)> invalidate_caches;

  std::chrono::milliseconds deadline_span(std::string_view phase) const {
    const auto found = phase_deadlines.find(phase);
    return found == phase_deadlines.end() ? deadline : found->second;
  }
  Deadline deadline_of(std::string_view phase) const { return deadline_in(deadline_span(phase)); }
  /// Long enough for all of init.
  Deadline init_deadline() const;
};

/// Whether the ranks of a job are processes of their own.
enum class RanksAre : std::uint8_t { threads, processes };

/// Who moves when nobody says: between processes "ucx", where it is registered and the weights live
/// in host memory; else "loopback".
std::string default_transport(const Registries& registries, RanksAre ranks, MemorySpace memory);

/// @p options with the transport named.
EngineOptions with_transport(const Registries& registries, EngineOptions options);

}  // namespace m2n
