// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How a worker's dtypes may differ from a checkpoint's, parameter by parameter.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/api/model.hpp"

namespace m2n::sinks {

class DtypePolicy {
 public:
  /// "pattern:dtype" or "pattern:dtype:exact|nearest_even", separated by commas: the first pattern
  /// that matches a parameter's name decides, also for one that keeps its dtype otherwise.
  /// @throws Error{usage} naming the rule.
  void set_rules(std::string_view text);

  DType of(const WorkerParameter& parameter) const;
  /// Whether tensors may be rounded on their way into @p parameter.
  bool may_cast(std::string_view parameter) const;

  std::optional<DType> worker;  ///< Of every floating-point parameter that does not keep its own.
  bool cast = false;            ///< Where no rule says otherwise.

 private:
  struct Rule {
    std::string pattern;
    DType dtype = DType::f32;
    std::optional<bool> cast;
  };
  const Rule* rule_of(std::string_view parameter) const;

  std::vector<Rule> rules_;
};

}  // namespace m2n::sinks
