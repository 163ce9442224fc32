// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Reads JSON input strictly: every complaint names the file and the place in it.

#include <boost/json/value.hpp>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace m2n {

/// A complaint about a JSON document, with its place.
class JsonError : public Error {
 public:
  using Error::Error;
};

/// The whole file. @throws Error{io} naming the file and the system's words.
std::string read_text_file(const std::filesystem::path& file);

/// @param where  Names the document in errors, e.g. its path.
/// @throws JsonError{bad_argument} for malformed text (with line and column), or a key that an
///         object has twice.
boost::json::value parse_json(std::string_view text, const std::string& where);

/// One value of a document and the path to it. A view: the document must outlive it.
class JsonReader {
 public:
  /// @param path  Of the value; starts with the document's name.
  JsonReader(const boost::json::value& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  /// @throws JsonError{bad_argument} "<path> <what>".
  [[noreturn]] void fail(const std::string& what) const;

  /// An object's member. at() fails when it is missing.
  JsonReader at(std::string_view key) const;
  std::optional<JsonReader> find(std::string_view key) const;
  /// Fails, naming the key and the choices, when the object has any other key.
  void allow_keys(std::initializer_list<std::string_view> keys) const;

  std::vector<JsonReader> items() const;
  std::vector<std::pair<std::string, JsonReader>> members() const;
  std::string_view string() const;
  bool boolean() const;
  std::int64_t integer() const;  ///< A whole number that fits; 3.0 is refused.
  double number() const;

  template <class Integer>
  Integer integer_in() const {
    const std::int64_t value = integer();
    if (std::cmp_less(value, 0) || std::cmp_greater(value, std::numeric_limits<Integer>::max())) {
      fail("is " + std::to_string(value) + "; it must be 0 to " +
           std::to_string(std::numeric_limits<Integer>::max()));
    }
    return static_cast<Integer>(value);
  }

  /// make(*this), with this value's path before the text of an Error.
  template <class Result, class Make>
  Result context(Make make) const {
    try {
      return make(*this);
    } catch (const JsonError&) {
      throw;
    } catch (const Error& error) {
      throw JsonError(error.code(), path_ + ": " + error.what());
    }
  }

 private:
  const boost::json::value* value_;
  std::string path_;
};

}  // namespace m2n
