// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How the steps of a link end together. Not installed.

#include <chrono>

#include "core/error.hpp"
#include "core/rendezvous/world_group.hpp"

namespace m2n {

/// All ranks have read the same verdict: nobody needs to be told.
class AgreedError final : public Error {
 public:
  using Error::Error;
};

inline void require(std::string_view phase, const Verdict& verdict) {
  if (!verdict.unanimous()) {
    throw AgreedError(Errc::bad_argument, explain(phase, verdict));
  }
}

}  // namespace m2n
