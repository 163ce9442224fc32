// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/dtypes.hpp"

#include <algorithm>

#include "core/api/patterns.hpp"
#include "core/error.hpp"
#include "core/tensor/cast.hpp"

namespace m2n::sinks {

void DtypePolicy::set_rules(std::string_view text) {
  for (const std::string& word : split(text, ',')) {
    const std::vector<std::string> parts = split(word, ':');
    const bool rounding = parts.size() == 3;
    if (parts.size() < 2 || parts.size() > 3 ||
        (rounding && parts[2] != "exact" && parts[2] != "nearest_even")) {
      throw Error(Errc::usage, "dtype rule '" + word +
                                   "' is none; a rule is PATTERN:DTYPE or "
                                   "PATTERN:DTYPE:exact|nearest_even");
    }
    Rule rule{parts[0], dtype_from_string(parts[1]), {}};
    if (rounding) {
      rule.cast = parts[2] == "nearest_even";
    }
    rules_.push_back(rule);
  }
}

const DtypePolicy::Rule* DtypePolicy::rule_of(std::string_view parameter) const {
  const auto found = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& rule) {
    return glob_matches(rule.pattern, parameter);
  });
  return found == rules_.end() ? nullptr : &*found;
}

DType DtypePolicy::of(const WorkerParameter& parameter) const {
  if (const Rule* rule = rule_of(parameter.name)) {
    return rule->dtype;
  }
  const bool floating = can_cast(parameter.dtype, DType::f32);
  return worker && floating && !parameter.keep_dtype ? *worker : parameter.dtype;
}

bool DtypePolicy::may_cast(std::string_view parameter) const {
  const Rule* rule = rule_of(parameter);
  return rule != nullptr && rule->cast ? *rule->cast : cast;
}

}  // namespace m2n::sinks
