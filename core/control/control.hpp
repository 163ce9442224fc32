// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The control plane: what rank 0 of the trainers asks of an inference deployment.

#include <boost/json/object.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "core/api/group.hpp"

namespace m2n {

/// What a deployment serves.
struct WeightState {
  std::uint64_t version = 0;  ///< The last that every worker committed; 0 for none.
  bool serving = false;       ///< Requests may be routed here: the weights are whole.
  std::string reason;         ///< Why not.
};

/// A worker deployment as the control plane sees it; implemented by whoever runs the workers. One
/// handler stands for all workers of a deployment.
///
/// - Collective: init_weight_transfer_engine() and update_weights() run beside a collective of
///   trainers and workers, and return when that has ended here.
/// - Threads: calls come from any thread, also several at once; a call out of turn throws.
///   weight_state() may come during every other call, and does not wait for it.
/// - Memory: arguments are the caller's, results the callee's to give.
/// - Streams: none.
/// - Errors: Error, with usage, bad_argument or bad_plan for what the caller did wrong. A call that
///   cannot end by its deadline throws Error{timed_out}. After an error in a round the weights are
///   the old ones or are not served.
class ControlHandler {
 public:
  ControlHandler() = default;
  ControlHandler(const ControlHandler&) = delete;
  ControlHandler& operator=(const ControlHandler&) = delete;
  virtual ~ControlHandler() = default;

  /// @param info  Where to meet, ranks, meshes, parameters. @return What the client should know;
  ///              may be empty, as everywhere here.
  virtual boost::json::object init_weight_transfer_engine(const boost::json::object& info,
                                                          Deadline deadline) = 0;
  virtual boost::json::object start_weight_update(const boost::json::object& round,
                                                  Deadline deadline) = 0;
  /// @param update  "names": the next parameters of the declared order.
  virtual boost::json::object update_weights(const boost::json::object& update,
                                             Deadline deadline) = 0;
  virtual boost::json::object finish_weight_update(const boost::json::object& round,
                                                   Deadline deadline) = 0;
  virtual WeightState weight_state() = 0;
};

/// The same calls, from the other side; implemented here.
///
/// - Collective: no. Rank 0 of the trainers alone has a client.
/// - Threads: any, also several calls at once.
/// - Memory: values are copied.
/// - Streams: none.
/// - Errors: those of the handler, with its code and text. Error{unavailable} when nobody answers,
///   Error{peer_lost} when the connection breaks during a call, Error{timed_out} at the deadline;
///   the text names the call and where it went.
class ControlClient {
 public:
  ControlClient() = default;
  ControlClient(const ControlClient&) = delete;
  ControlClient& operator=(const ControlClient&) = delete;
  virtual ~ControlClient() = default;

  virtual boost::json::object init_weight_transfer_engine(const boost::json::object& info,
                                                          Deadline deadline) = 0;
  virtual boost::json::object start_weight_update(const boost::json::object& round,
                                                  Deadline deadline) = 0;
  virtual boost::json::object update_weights(const boost::json::object& update,
                                             Deadline deadline) = 0;
  virtual boost::json::object finish_weight_update(const boost::json::object& round,
                                                   Deadline deadline) = 0;
  virtual WeightState weight_state(Deadline deadline) = 0;

  /// Calls under way, and later ones, throw Error{peer_lost} with @p reason: for a trainer that has
  /// failed elsewhere. A handler in this process is not interrupted.
  virtual void cancel(const std::string& reason) noexcept = 0;
};

/// Calls @p handler directly, in the caller's thread.
std::unique_ptr<ControlClient> make_local_client(std::shared_ptr<ControlHandler> handler);

}  // namespace m2n
