// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The workers of a deployment behind one control handler, when all of them are in this process.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/control/control.hpp"
#include "core/engine/requests.hpp"
#include "core/engine/worker_engine.hpp"

namespace m2n {

/// The calls of the control plane that go to every worker.
enum class ControlCall : std::uint8_t { init, start, update, finish };
std::string_view to_string(ControlCall call);  ///< As HTTP names it.

/// A call and what it brings.
struct CallRequest {
  ControlCall call = ControlCall::init;
  InitRequest init;
  RoundRequest round;  ///< Of the other calls.
};
/// @throws Error{bad_argument} for a body that is none of @p call.
CallRequest read_call(ControlCall call, const boost::json::object& body);

/// Runs a call on one worker. @return Whether that was a finish that had its caches invalidated.
bool run_call(WorkerEngine& worker, const CallRequest& request);

/// The answer to a @p call that went well everywhere. An init says how updates may tell what they
/// bring: "update_by": ["names", "range"]. A finish says "caches": "invalidated", or "unsupported"
/// when @p invalidated is not so of all workers.
boost::json::object call_answer(ControlCall call, bool invalidated);
/// Whether who answered an init so takes ranges in updates; otherwise it takes names.
bool takes_ranges(const boost::json::object& init_answer);

/// What the workers' errors are together: each distinct text once.
std::string join_errors(const std::vector<std::string>& errors);

/// A handler that runs every call on all @p workers at once, each in a thread of its own. Either
/// all succeed, or the call throws; when some fail alone, all give up. Calls run one at a time.
/// @param workers  Of one deployment, by number. A loan.
std::shared_ptr<ControlHandler> make_deployment(std::vector<WorkerEngine*> workers);

}  // namespace m2n
