// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What engines tell while they work: one event, one line.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/layout/mesh.hpp"

namespace m2n {

/// Something that began, ended or failed on one rank.
struct Event {
  enum class Level : std::uint8_t { info, error };

  Level level = Level::info;
  Rank rank = 0;     ///< In the world.
  std::string part;  ///< "trainer" or "worker".
  std::string phase;
  std::optional<std::uint64_t> version;
  double seconds = 0;
  std::string detail;  ///< A sentence, or key=value words.
};

/// Called in the thread where the event happens; must be thread-safe when ranks are threads.
using EventSink = std::function<void(const Event&)>;

/// "rank=3 level=info part=trainer phase=move version=2 duration_ms=1.25 detail="..."", without the
/// end of line. Values with blanks or quotes are quoted.
std::string to_line(const Event& event);
/// One JSON object with the same keys; the duration is a number.
std::string to_json(const Event& event);

}  // namespace m2n
