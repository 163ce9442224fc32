// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the control plane says over HTTP, apart from how it travels.

#include <boost/json/object.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "core/control/control.hpp"
#include "core/error.hpp"

namespace m2n::http {

enum class Call { init, start, update, finish, version, health };

/// The call's name, which is its route.
std::string_view to_string(Call call);
/// @param target  As in a request line: "/update_weights", perhaps with "?..." behind.
std::optional<Call> find_call(std::string_view target);
/// GET rather than POST.
bool is_get(Call call);

struct Answer {
  unsigned status = 200;
  boost::json::object body;
};

/// Runs @p call; what the handler throws becomes an answer.
/// @param body  Of the request, as it came.
Answer run_call(ControlHandler& handler, Call call, std::string_view body, Deadline deadline);

Answer error_answer(unsigned status, std::string_view type, const std::string& message);
Answer error_answer(const Error& error);

/// The other way around: returns the body of a good answer, and throws the Error that the others
/// hold. @param where  Names the call and the server in errors.
boost::json::object read_answer(const std::string& where, unsigned status, std::string_view body);
WeightState read_weight_state(const std::string& where, const boost::json::object& body);

}  // namespace m2n::http
