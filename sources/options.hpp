// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Options of a source: text that is checked once, with errors that name key and choices.

#include <string>
#include <string_view>
#include <vector>

#include "core/api/patterns.hpp"
#include "core/api/registry.hpp"
#include "core/tensor/shape.hpp"

namespace m2n::sources {

using m2n::glob_matches;
using m2n::split;

/// "pattern:word": what a word says about every name that the pattern matches.
struct NameRule {
  std::string pattern;
  std::string word;
};

/// The first rule that matches @p name, or null.
const NameRule* first_match(const std::vector<NameRule>& rules, std::string_view name) noexcept;

/// Reads the options of one source.
/// Every member throws Error{usage}, naming source, key and what would be right.
class OptionReader {
 public:
  /// Refuses keys that are neither in @p keys nor start with one of @p prefixes.
  OptionReader(std::string source, const Options& options, std::vector<std::string> keys,
               std::vector<std::string> prefixes = {});

  bool has(std::string_view key) const { return options_.find(key) != options_.end(); }
  std::string text(std::string_view key, std::string_view fallback) const;
  /// A whole number of at least @p least.
  Index number(std::string_view key, Index fallback, Index least = 1) const;
  bool boolean(std::string_view key, bool fallback) const;
  /// One of @p choices.
  std::string choice(std::string_view key, const std::vector<std::string>& choices,
                     std::string_view fallback) const;
  /// "2,4": whole numbers of at least @p least; empty when the key is not given.
  std::vector<Index> numbers(std::string_view key, Index least = 0) const;
  /// "pattern,pattern".
  std::vector<std::string> patterns(std::string_view key) const;
  /// "pattern:word,pattern:word"; words must be among @p words unless that is empty.
  std::vector<NameRule> rules(std::string_view key, const std::vector<std::string>& words) const;
  /// The options whose keys start with @p prefix, without it.
  std::vector<NameRule> prefixed(std::string_view prefix) const;

  /// @throws Error{usage} "source 's': option 'key' is 'value', <wanted>".
  [[noreturn]] void refuse(std::string_view key, const std::string& wanted) const;
  /// @throws Error{usage} "source 's': <what>".
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  Index parse(std::string_view key, std::string_view word, Index least) const;

  std::string source_;
  Options options_;
};

}  // namespace m2n::sources
