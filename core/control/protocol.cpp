// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/control/protocol.hpp"

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <exception>
#include <utility>

#include "core/io/json_reader.hpp"

namespace m2n::http {

namespace json = boost::json;

namespace {

struct CallRow {
  Call call;
  std::string_view name;
  std::string_view envelope;  ///< The key that some clients put the object under.
};
constexpr std::array<CallRow, 6> kCalls = {{
    {Call::init, "init_weight_transfer_engine", "init_info"},
    {Call::start, "start_weight_update", ""},
    {Call::update, "update_weights", "update_info"},
    {Call::finish, "finish_weight_update", ""},
    {Call::version, "weight_version", ""},
    {Call::health, "health", ""},
}};

const CallRow& row_of(Call call) { return kCalls.at(static_cast<std::size_t>(call)); }

struct CodeRow {
  Errc code;
  std::string_view type;
  unsigned status;
};
constexpr std::array<CodeRow, 7> kCodes = {{
    {Errc::usage, "usage", 400},
    {Errc::bad_argument, "bad_argument", 400},
    {Errc::bad_plan, "bad_plan", 400},
    {Errc::unavailable, "unavailable", 503},
    {Errc::peer_lost, "peer_lost", 502},
    {Errc::timed_out, "timed_out", 504},
    {Errc::io, "io", 500},
}};

/// As much of an answer that is not ours as fits into a sentence.
constexpr std::size_t kQuoteBytes = 200;

json::object parse_body(Call call, std::string_view body) {
  const std::string where = "the body of " + std::string(to_string(call));
  if (body.empty() && (call == Call::start || call == Call::finish)) {
    return {};
  }
  json::value value = parse_json(body, where);
  if (!value.is_object()) {
    throw Error(Errc::bad_argument, where + " must be a JSON object");
  }
  json::object& object = value.get_object();
  const std::string_view envelope = row_of(call).envelope;
  if (json::value* inner =
          object.size() == 1 && !envelope.empty() ? object.if_contains(envelope) : nullptr) {
    if (!inner->is_object()) {
      throw Error(Errc::bad_argument,
                  where + ": '" + std::string(envelope) + "' must be a JSON object");
    }
    json::object unwrapped = std::move(inner->get_object());
    return unwrapped;
  }
  return std::move(object);
}

json::object describe(const WeightState& state) {
  return {{"weight_version", state.version}, {"serving", state.serving}, {"reason", state.reason}};
}

Answer answer_call(ControlHandler& handler, Call call, std::string_view body, Deadline deadline) {
  switch (call) {
    case Call::init:
      return {200, handler.init_weight_transfer_engine(parse_body(call, body), deadline)};
    case Call::start:
      return {200, handler.start_weight_update(parse_body(call, body), deadline)};
    case Call::update:
      return {200, handler.update_weights(parse_body(call, body), deadline)};
    case Call::finish:
      return {200, handler.finish_weight_update(parse_body(call, body), deadline)};
    case Call::version:
      return {200, describe(handler.weight_state())};
    case Call::health: {
      const WeightState state = handler.weight_state();
      return {state.serving ? 200U : 503U, describe(state)};
    }
  }
  return error_answer(404, "usage", "no such call");
}

}  // namespace

std::string_view to_string(Call call) { return row_of(call).name; }

std::optional<Call> find_call(std::string_view target) {
  const std::string_view path = target.substr(0, target.find('?'));
  for (const CallRow& row : kCalls) {
    if (path.size() == row.name.size() + 1 && path.front() == '/' && path.substr(1) == row.name) {
      return row.call;
    }
  }
  return std::nullopt;
}

bool is_get(Call call) { return call == Call::version || call == Call::health; }

Answer error_answer(unsigned status, std::string_view type, const std::string& message) {
  return {status,
          {{"error", json::object{{"type", type}, {"message", message}, {"code", status}}}}};
}

Answer error_answer(const Error& error) {
  const auto* row = std::ranges::find(kCodes, error.code(), &CodeRow::code);
  return error_answer(row->status, row->type, error.what());
}

Answer run_call(ControlHandler& handler, Call call, std::string_view body, Deadline deadline) {
  try {
    return answer_call(handler, call, body, deadline);
  } catch (const Error& error) {
    return error_answer(error);
  } catch (const std::exception& error) {
    return error_answer(500, "internal", std::string(to_string(call)) + ": " + error.what());
  }
}

json::object read_answer(const std::string& where, unsigned status, std::string_view body) {
  boost::system::error_code malformed;
  json::value value = json::parse(body, malformed);
  const bool object = !malformed && value.is_object();
  if (status == 200 && object) {
    return std::move(value.get_object());
  }
  if (object) {
    const json::value* error = value.get_object().if_contains("error");
    const json::object* fields = error != nullptr ? error->if_object() : nullptr;
    const json::value* type = fields != nullptr ? fields->if_contains("type") : nullptr;
    const json::value* message = fields != nullptr ? fields->if_contains("message") : nullptr;
    if (type != nullptr && type->is_string() && message != nullptr && message->is_string()) {
      const auto* row =
          std::ranges::find(kCodes, std::string_view(type->get_string()), &CodeRow::type);
      throw Error(row != kCodes.end() ? row->code : Errc::io, std::string(message->get_string()));
    }
  }
  throw Error(Errc::unavailable, where + ": the server answered with status " +
                                     std::to_string(status) + " and no JSON object of this " +
                                     "protocol: '" + std::string(body.substr(0, kQuoteBytes)) +
                                     "'");
}

WeightState read_weight_state(const std::string& where, const json::object& body) {
  const json::value document = body;
  const JsonReader reader(document, where);
  WeightState state;
  state.version = reader.at("weight_version").integer_in<std::uint64_t>();
  state.serving = reader.at("serving").boolean();
  state.reason = reader.at("reason").string();
  return state;
}

}  // namespace m2n::http
