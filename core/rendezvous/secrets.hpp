// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Shared tokens: how they are proved and compared.

#include <cstddef>
#include <string>
#include <string_view>

namespace m2n {

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMaxHashBytes = 64;

/// kNonceBytes unpredictable bytes. @throws Error{unavailable}
std::string make_nonce();

/// HMAC-SHA-256. @throws Error{bad_argument} for a key of more than 2 GiB.
std::string keyed_hash(std::string_view key, std::string_view text);

/// Whether they are equal, in a time that does not depend on where they differ.
bool equal_secrets(std::string_view a, std::string_view b);

}  // namespace m2n
