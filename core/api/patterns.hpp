// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Patterns and lists in options that speak about names.

#include <string>
#include <string_view>
#include <vector>

namespace m2n {

/// Without blanks around it.
std::string_view trimmed(std::string_view text);

/// True when @p name matches @p pattern: '*' stands for any text, dots included, and '?' for one
/// character.
bool glob_matches(std::string_view pattern, std::string_view name) noexcept;

/// The parts of @p text between @p separator, blanks around them dropped. Separators inside
/// parentheses do not count. Empty text has no part.
std::vector<std::string> split(std::string_view text, char separator);

/// "a, b, c and 4 more".
std::string list_of(const std::vector<std::string>& names);

}  // namespace m2n
