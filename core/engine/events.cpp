// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/events.hpp"

#include <array>
#include <boost/json.hpp>
#include <cstdio>

namespace m2n {
namespace {

std::string_view to_string(Event::Level level) {
  switch (level) {
    case Event::Level::info:
      return "info";
    case Event::Level::error:
      return "error";
  }
  return "unknown";
}

std::string milliseconds(double seconds) {
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.3f", seconds * 1e3);
  return {text.data(), static_cast<std::size_t>(size > 0 ? size : 0)};
}

/// As it is, or in quotes with JSON's escapes where it would not read as one word.
std::string word(const std::string& text) {
  if (!text.empty() && text.find_first_of(" \t\r\n\"=") == text.npos) {
    return text;
  }
  return boost::json::serialize(boost::json::string(text));
}

}  // namespace

std::string to_line(const Event& event) {
  std::string line = "rank=" + std::to_string(event.rank) +
                     " level=" + std::string(to_string(event.level)) + " part=" + word(event.part) +
                     " phase=" + word(event.phase);
  if (event.version) {
    line += " version=" + std::to_string(*event.version);
  }
  line += " duration_ms=" + milliseconds(event.seconds);
  if (!event.detail.empty()) {
    line += " detail=" + word(event.detail);
  }
  return line;
}

std::string to_json(const Event& event) {
  boost::json::object out{{"rank", event.rank},
                          {"level", to_string(event.level)},
                          {"part", event.part},
                          {"phase", event.phase}};
  if (event.version) {
    out["version"] = *event.version;
  }
  out["duration_ms"] = event.seconds * 1e3;
  if (!event.detail.empty()) {
    out["detail"] = event.detail;
  }
  return boost::json::serialize(out);
}

}  // namespace m2n
