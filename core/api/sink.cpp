// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "core/api/sink.hpp"

namespace m2n {

std::string_view to_string(Mode mode) {
  switch (mode) {
    case Mode::direct:
      return "direct";
    case Mode::fallback:
      return "fallback";
  }
  return "unknown";
}

}  // namespace m2n
