// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// How parameters and layouts stand in texts and request bodies. Not installed.

#include <boost/json/value.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/io/json_reader.hpp"
#include "core/plan/problem.hpp"

namespace m2n::param_lines {

/// Layouts by their text, so that equal ones are one object and are worked out once.
class Layouts {
 public:
  /// @param numbered  A layout that came before is told by its number, from 0 on.
  explicit Layouts(bool numbered = false) : numbered_(numbered) {}

  /// @param raw   The side, as @p value reads it.
  /// @param name  Of the parameter, and of its buffer where none is named.
  Side side(const JsonReader& value, const boost::json::value& raw, const std::string& name);

 private:
  std::shared_ptr<const Layout> get(const boost::json::value& canonical, const std::string& where);

  bool numbered_;
  std::unordered_map<std::string, std::shared_ptr<const Layout>> by_text_;
  std::vector<std::shared_ptr<const Layout>> in_order_;
};

/// The other way around. Canonical texts are worked out once a layout.
class LayoutTexts {
 public:
  /// @param numbered  See Layouts. Numbers go by texts, which are the same on every rank.
  explicit LayoutTexts(bool numbered = false) : numbered_(numbered) {}

  void append_side(std::string& out, const Side& side, const std::string& name);

 private:
  bool numbered_;
  std::unordered_map<const Layout*, std::string> by_layout_;  // what stands for it from now on
  std::unordered_map<std::string, std::string> by_text_;      // its number
};

/// Reads parameters. Most of a model's say the same as others behind their names: that is read
/// once, and known from then on.
class ParamReader {
 public:
  /// @param line  Of params_to_text().
  ParamSpec read_line(std::string_view line);
  /// @param path  Of @p value in its document, for errors.
  ParamSpec read(const boost::json::value& value, const std::string& path);

 private:
  struct Known {
    ParamSpec param;
    bool own_buffer = true;  ///< Its one buffer has its name.
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>{}(text);
    }
  };

  template <class Make>
  ParamSpec get(std::string_view line, Make make);
  Known make(const JsonReader& value, const boost::json::value& raw);

  Layouts layouts_;
  std::unordered_map<std::string, Known, Hash, std::equal_to<>> known_;  // by what follows names
};

/// As json::serialize() does, and faster for the names of most parameters.
void append_quoted(std::string& out, std::string_view text);
/// Its line of params_to_text(), without the end.
void append_param(std::string& out, const ParamSpec& param, LayoutTexts& layouts);

/// Takes the first line off @p text.
std::string_view take_line(std::string_view& text);
std::size_t count_lines(std::string_view text);

}  // namespace m2n::param_lines
