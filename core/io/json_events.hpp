// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// JSON as a stream of events, for large texts that must be checked key by key: unlike a document
/// tree it shows duplicate keys, and a reader may stop at the first value that is out of place.

#include <string>
#include <string_view>

namespace m2n {

/// Receives one call a value, in the order of the text. A call may throw to stop.
class JsonEvents {
 public:
  JsonEvents() = default;
  JsonEvents(const JsonEvents&) = delete;
  JsonEvents& operator=(const JsonEvents&) = delete;
  virtual ~JsonEvents() = default;

  virtual void begin_object() = 0;
  virtual void end_object() = 0;
  virtual void begin_array() = 0;
  virtual void end_array() = 0;
  virtual void key(std::string_view name) = 0;  ///< Unescaped; valid for the call.
  virtual void string(std::string_view value) = 0;
  virtual void number(std::string_view text) = 0;     ///< As written.
  virtual void constant(std::string_view value) = 0;  ///< true, false or null.
};

/// Feeds @p events with the one JSON value that @p text holds, white space around it allowed.
/// @param where  Subject of messages: "model.safetensors: the header".
/// @throws Error{bad_argument} with line and column when @p text is not UTF-8, not JSON, nested
///         deeper than 32 levels, or goes on after its value; and whatever @p events throws.
void read_json(std::string_view text, const std::string& where, JsonEvents& events);

/// @p text as a JSON string, in quotation marks.
std::string json_quoted(std::string_view text);

/// @p name in single quotes for a message: control characters and stray bytes as \xNN, and cut
/// after 200 bytes.
std::string message_quoted(std::string_view name);

}  // namespace m2n
