// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sinks/models/names.hpp"

#include <algorithm>

#include "core/api/patterns.hpp"
#include "core/error.hpp"

namespace m2n::models {

NameRules::NameRules(std::string_view text) {
  for (const std::string& rule : split(text, ',')) {
    const std::string_view view = rule;
    const auto colon = view.find(':');
    const std::string_view kind = view.substr(0, colon);
    const std::string_view rest = colon == view.npos ? "" : view.substr(colon + 1);
    const auto arrow = rest.find("->");
    if (kind == "drop" && !rest.empty()) {
      dropped_.emplace_back(rest);
    } else if ((kind == "prefix" || kind == "suffix") && arrow != rest.npos) {
      (kind == "prefix" ? prefixes_ : suffixes_)
          .push_back({std::string(rest.substr(0, arrow)), std::string(rest.substr(arrow + 2))});
    } else {
      throw Error(Errc::usage, "name rule '" + rule +
                                   "' is none; rules are prefix:FROM->TO, suffix:FROM->TO and "
                                   "drop:PATTERN");
    }
  }
}

std::optional<std::string> NameRules::operator()(std::string_view offered) const {
  if (std::any_of(dropped_.begin(), dropped_.end(),
                  [&](const std::string& pattern) { return glob_matches(pattern, offered); })) {
    return std::nullopt;
  }
  std::string name(offered);
  const auto prefix = std::find_if(prefixes_.begin(), prefixes_.end(), [&](const Change& change) {
    return name.starts_with(change.from);
  });
  if (prefix != prefixes_.end()) {
    name.replace(0, prefix->from.size(), prefix->to);
  }
  const auto suffix = std::find_if(suffixes_.begin(), suffixes_.end(), [&](const Change& change) {
    return name.ends_with(change.from);
  });
  if (suffix != suffixes_.end()) {
    name.replace(name.size() - suffix->from.size(), suffix->from.size(), suffix->to);
  }
  return name;
}

}  // namespace m2n::models
