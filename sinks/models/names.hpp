// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From the names that a trainer offers to the names that a family knows.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace m2n::models {

/// "prefix:model.language_model.->language_model.model.,suffix:_scale->_scale_inv,drop:*.inv_freq":
/// a dropped name is known and not needed; else the first prefix rule that fits is applied, and
/// then the first suffix rule.
class NameRules {
 public:
  /// @throws Error{usage} naming the rule that is none.
  explicit NameRules(std::string_view text);

  /// The family's name, or nothing for a dropped one.
  std::optional<std::string> operator()(std::string_view offered) const;

 private:
  struct Change {
    std::string from;
    std::string to;
  };
  std::vector<Change> prefixes_;
  std::vector<Change> suffixes_;
  std::vector<std::string> dropped_;
};

}  // namespace m2n::models
