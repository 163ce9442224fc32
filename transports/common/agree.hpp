// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Steps that may fail on one rank and must then fail on all, with the same text.

#include <exception>
#include <optional>
#include <string_view>

#include "core/api/group.hpp"
#include "core/error.hpp"

namespace m2n {

/// What @p action throws, if anything.
template <class Action>
std::optional<Error> error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(Errc::unavailable, error.what());
  }
  return std::nullopt;
}

/// Collective. @throws TransportError on every rank, the same, when any rank has an error: the code
/// and the text of the first such rank, and its number.
void agree(Group& group, std::string_view phase, const std::optional<Error>& mine,
           Deadline deadline);

}  // namespace m2n
