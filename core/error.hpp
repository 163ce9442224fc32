// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Typed errors: one code per thing that a caller can do about a failure.

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace m2n {

/// What a caller can do about a failure; never which library reported it.
enum class Errc {
  usage,         ///< The request itself is malformed. Ask differently. (Exit status 2.)
  bad_argument,  ///< A value, a file or a layout is wrong. Fix the input.
  bad_plan,      ///< Plan and layouts disagree. Plan again.
  unavailable,   ///< Not built in, or no such device here. Pick another implementation.
  peer_lost,     ///< A rank died or its link failed. Rebuild the group.
  timed_out,     ///< A deadline passed; the remote state is unknown. Rebuild the group.
  io,            ///< A file or a dataset failed. The text holds its path.
};

std::string_view to_string(Errc code);

/// Base of everything that m2n throws. what() is one sentence: the subject, what is wrong, and
/// what would be right.
class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& what,
        std::source_location where = std::source_location::current());

  Errc code() const noexcept { return code_; }
  const std::source_location& where() const noexcept { return where_; }

 private:
  Errc code_;
  std::source_location where_;
};

/// A transport failed. After this only the destructors of the session and the transport may run.
class TransportError : public Error {
 public:
  using Error::Error;
};

/// A caller's mistake in a public call. Always on; costs one branch.
/// @throws Error{bad_argument} "expected <rule>" when @p ok is false.
void expects(bool ok, const char* rule,
             std::source_location where = std::source_location::current());

}  // namespace m2n
