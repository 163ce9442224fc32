// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/options.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace m2n::sources {

namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

}  // namespace

const NameRule* first_match(const std::vector<NameRule>& rules, std::string_view name) noexcept {
  for (const auto& rule : rules) {
    if (glob_matches(rule.pattern, name)) {
      return &rule;
    }
  }
  return nullptr;
}

OptionReader::OptionReader(std::string source, const Options& options,
                           std::vector<std::string> keys, std::vector<std::string> prefixes)
    : source_(std::move(source)), options_(options) {
  for (const auto& option : options_) {
    const std::string& key = option.first;
    const bool known = std::find(keys.begin(), keys.end(), key) != keys.end() ||
                       std::any_of(prefixes.begin(), prefixes.end(), [&](const auto& prefix) {
                         return key.size() > prefix.size() && key.starts_with(prefix);
                       });
    if (!known) {
      for (const auto& prefix : prefixes) {
        keys.push_back(prefix + "<pattern>");
      }
      std::sort(keys.begin(), keys.end());
      refuse("there is no option '" + key + "'; " +
             (keys.empty() ? "it has none" : "the choices are " + joined(keys)));
    }
  }
}

std::string OptionReader::text(std::string_view key, std::string_view fallback) const {
  const auto found = options_.find(key);
  return std::string(trimmed(found == options_.end() ? fallback : found->second));
}

Index OptionReader::parse(std::string_view key, std::string_view word, Index least) const {
  Index value = 0;
  const auto [end, code] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (word.empty() || code != std::errc() || end != word.data() + word.size() || value < least) {
    refuse(key, "expected a whole number of at least " + std::to_string(least));
  }
  return value;
}

Index OptionReader::number(std::string_view key, Index fallback, Index least) const {
  return has(key) ? parse(key, text(key, ""), least) : fallback;
}

bool OptionReader::boolean(std::string_view key, bool fallback) const {
  return choice(key, {"true", "false"}, fallback ? "true" : "false") == "true";
}

std::string OptionReader::choice(std::string_view key, const std::vector<std::string>& choices,
                                 std::string_view fallback) const {
  std::string value = text(key, fallback);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    refuse(key, "the choices are " + joined(choices));
  }
  return value;
}

std::vector<Index> OptionReader::numbers(std::string_view key, Index least) const {
  std::vector<Index> values;
  for (const auto& word : split(text(key, ""), ',')) {
    values.push_back(parse(key, word, least));
  }
  if (has(key) && values.empty()) {
    refuse(key, "expected a list like 2,4");
  }
  return values;
}

std::vector<std::string> OptionReader::patterns(std::string_view key) const {
  std::vector<std::string> values = split(text(key, ""), ',');
  if (std::find(values.begin(), values.end(), "") != values.end()) {
    refuse(key, "expected name patterns like *.bias,*_norm.*");
  }
  return values;
}

std::vector<NameRule> OptionReader::rules(std::string_view key,
                                          const std::vector<std::string>& words) const {
  std::vector<NameRule> rules;
  for (const auto& item : split(text(key, ""), ',')) {
    const auto parts = split(item, ':');
    if (parts.size() != 2 || parts[0].empty() ||
        (!words.empty() && std::find(words.begin(), words.end(), parts[1]) == words.end())) {
      refuse(key, "expected a list of pattern:word" +
                      (words.empty() ? "" : ", where a word is one of " + joined(words)));
    }
    rules.push_back({parts[0], parts[1]});
  }
  return rules;
}

std::vector<NameRule> OptionReader::prefixed(std::string_view prefix) const {
  std::vector<NameRule> rules;
  for (const auto& [key, value] : options_) {
    if (key.starts_with(prefix)) {
      rules.push_back({key.substr(prefix.size()), value});
    }
  }
  return rules;
}

void OptionReader::refuse(std::string_view key, const std::string& wanted) const {
  refuse("option '" + std::string(key) + "' is '" + text(key, "") + "', " + wanted);
}

void OptionReader::refuse(const std::string& what) const {
  throw Error(Errc::usage, "source '" + source_ + "': " + what);
}

}  // namespace m2n::sources
