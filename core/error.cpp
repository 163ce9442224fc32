// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"

namespace m2n {

std::string_view to_string(Errc code) {
  switch (code) {
    case Errc::usage:
      return "usage";
    case Errc::bad_argument:
      return "bad argument";
    case Errc::bad_plan:
      return "bad plan";
    case Errc::unavailable:
      return "unavailable";
    case Errc::peer_lost:
      return "peer lost";
    case Errc::timed_out:
      return "timed out";
    case Errc::io:
      return "io";
  }
  return "unknown";
}

Error::Error(Errc code, const std::string& what, std::source_location where)
    : std::runtime_error(what), code_(code), where_(where) {}

void expects(bool ok, const char* rule, std::source_location where) {
  if (!ok) [[unlikely]] {
    throw Error(Errc::bad_argument, std::string("expected ") + rule, where);
  }
}

}  // namespace m2n
