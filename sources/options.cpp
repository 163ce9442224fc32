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

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

}  // namespace

bool glob_matches(std::string_view pattern, std::string_view name) noexcept {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;  // the last '*', to fall back to
  std::size_t resume = 0;                     // where that '*' stops eating
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') {
    ++p;
  }
  return p == pattern.size();
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  if (trimmed(text).empty()) {
    return parts;
  }
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == separator && depth == 0)) {
      parts.emplace_back(trimmed(text.substr(begin, i - begin)));
      begin = i + 1;
    } else if (text[i] == '(') {
      ++depth;
    } else if (text[i] == ')') {
      --depth;
    }
  }
  return parts;
}

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
