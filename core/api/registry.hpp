// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Registries: implementations of one interface, by name.

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace m2n {

/// Settings of a plug-in, as text. Each plug-in states its keys, and refuses unknown ones.
using Options = std::map<std::string, std::string, std::less<>>;

/// Refuses every key of @p options that is not in @p known. @param who  "planner 'striped'".
/// @throws Error{usage} naming the key and the choices.
void require_known_options(std::string_view who, const Options& options,
                           std::initializer_list<std::string_view> known);
inline void require_no_options(std::string_view who, const Options& options) {
  require_known_options(who, options, {});
}

/// Factories of one interface. A value: filled before the first create(), read-only afterwards;
/// then create() may be called from any thread.
template <class Interface, class Context>
class Registry {
 public:
  using Factory = std::function<std::unique_ptr<Interface>(const Context&)>;
  struct Entry {
    Factory factory;
    std::string summary;  ///< One line for `m2n list`: what it does, and what it needs.
  };

  /// @param kind  What is registered, for messages: "planner".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  /// @throws Error{bad_argument} when @p name is taken.
  void add(const std::string& name, std::string summary, Factory factory) {
    if (!entries_.emplace(name, Entry{std::move(factory), std::move(summary)}).second) {
      throw Error(Errc::bad_argument, kind_ + " '" + name + "' is registered twice");
    }
  }

  bool contains(std::string_view name) const { return entries_.find(name) != entries_.end(); }

  /// Hands over a new object. @throws Error{usage} with the names that would have worked.
  std::unique_ptr<Interface> create(std::string_view name, const Context& context) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
      std::string text = "no " + kind_ + " '" + std::string(name) + "'; the choices are ";
      const char* separator = "";
      for (const auto& entry : entries_) {
        text += separator + entry.first;
        separator = ", ";
      }
      throw Error(Errc::usage, text);
    }
    return found->second.factory(context);
  }

  const std::map<std::string, Entry, std::less<>>& entries() const noexcept { return entries_; }
  const std::string& kind() const noexcept { return kind_; }

 private:
  std::string kind_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace m2n
