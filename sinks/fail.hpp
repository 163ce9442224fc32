// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How this house refuses.

#include <string>

#include "core/error.hpp"

namespace m2n {

/// @throws Error{bad_argument} always.
[[noreturn]] inline void fail(const std::string& text) { throw Error(Errc::bad_argument, text); }

}  // namespace m2n
