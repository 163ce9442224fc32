// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The sizes of a model, from a config.json or from options.

#include <string>
#include <string_view>
#include <vector>

#include "core/api/registry.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"
#include "sinks/models/family.hpp"

namespace m2n::models {

/// Sizes and switches by their names in a config.json, from its text ("config") or from options of
/// those names; an option wins. Members of an inner object have its name and a dot before theirs.
/// Keys of the config that nobody asks for do not matter.
class Sizes {
 public:
  /// @param keys  Every option that the family knows besides "config" and common_keys().
  /// @throws Error{usage} for an option that is not among them, Error{bad_argument} for a config
  ///         that is no JSON object.
  Sizes(std::string family, const Options& options, std::vector<std::string> keys);

  /// The same sizes of an inner object: size("a") is size("prefix.a") there, or "a" without it.
  Sizes inner(const std::string& prefix) const;

  /// What a config leaves out because it is its family's default.
  void otherwise(const std::string& key, const std::string& value);

  bool has(std::string_view key) const { return find(key) != nullptr; }
  /// A number of at least 1. @throws Error{bad_argument} when it is missing or not one.
  Index size(std::string_view key) const;
  Index size_or(std::string_view key, Index otherwise) const;
  /// The same from 0 on.
  Index count_or(std::string_view key, Index otherwise) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key, std::string_view otherwise) const;
  /// One of @p choices, the first by default.
  std::string choice(std::string_view key, const std::vector<std::string>& choices) const;
  /// "dtype" or "torch_dtype", spelled as in m2n or as in a config ("bfloat16").
  DType dtype(DType otherwise) const;
  /// size(whole) / size(parts). @throws Error{bad_argument} when it leaves a rest.
  Index quotient(std::string_view whole, std::string_view parts) const;

  /// The units of a size.
  Units units(const std::string& key) const { return {key, size(key)}; }

  /// Fills what every family has: name, dtype, roots, name rules and vocabulary padding.
  Table table(DType dtype, const std::string& root) const;

 private:
  const std::string* find(std::string_view key) const;
  Index number(std::string_view key, Index least) const;

  std::string family_;
  std::string prefix_;
  Options values_;
};

}  // namespace m2n::models
