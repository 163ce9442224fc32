// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/json_reader.hpp"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/parse.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

namespace m2n {
namespace {

namespace json = boost::json;

/// Finds keys that an object has twice: the DOM parser keeps the last one silently.
class DuplicateKeys {
 public:
  static constexpr std::size_t max_object_size = std::size_t(-1);  // names as Boost.JSON asks
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);

  const std::string& found() const noexcept { return found_; }

  bool on_document_begin(json::error_code&) { return true; }
  bool on_document_end(json::error_code&) { return true; }
  bool on_object_begin(json::error_code&) {
    keys_.emplace_back();
    return true;
  }
  bool on_object_end(std::size_t, json::error_code&) {
    keys_.pop_back();
    return true;
  }
  bool on_array_begin(json::error_code&) { return true; }
  bool on_array_end(std::size_t, json::error_code&) { return true; }
  bool on_key_part(json::string_view part, std::size_t, json::error_code&) {
    key_.append(part.data(), part.size());
    return true;
  }
  bool on_key(json::string_view part, std::size_t, json::error_code&) {
    key_.append(part.data(), part.size());
    if (!keys_.back().insert(key_).second && found_.empty()) {
      found_ = key_;
    }
    key_.clear();
    return true;
  }
  bool on_string_part(json::string_view, std::size_t, json::error_code&) { return true; }
  bool on_string(json::string_view, std::size_t, json::error_code&) { return true; }
  bool on_number_part(json::string_view, json::error_code&) { return true; }
  bool on_int64(std::int64_t, json::string_view, json::error_code&) { return true; }
  bool on_uint64(std::uint64_t, json::string_view, json::error_code&) { return true; }
  bool on_double(double, json::string_view, json::error_code&) { return true; }
  bool on_bool(bool, json::error_code&) { return true; }
  bool on_null(json::error_code&) { return true; }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }

 private:
  std::vector<std::set<std::string>> keys_;
  std::string key_;
  std::string found_;
};

/// "line 3, column 14" of a byte.
std::string place(std::string_view text, std::size_t at) {
  const std::string_view before = text.substr(0, at);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t line_start = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
  return "line " + std::to_string(line) + ", column " + std::to_string(at - line_start + 1);
}

}  // namespace

std::string read_text_file(const std::filesystem::path& file) {
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) {
    throw Error(Errc::io, file.string() + " is a folder; a file is needed");
  }
  std::ifstream stream(file, std::ios::binary);
  if (!stream) {
    throw Error(Errc::io, "cannot open " + file.string() + ": " + std::strerror(errno));
  }
  std::ostringstream text;
  text << stream.rdbuf();
  if (stream.bad()) {
    throw Error(Errc::io, "cannot read " + file.string() + ": " + std::strerror(errno));
  }
  return std::move(text).str();
}

boost::json::value parse_json(std::string_view text, const std::string& where) {
  json::basic_parser<DuplicateKeys> keys{json::parse_options()};
  json::error_code error;
  std::size_t used = keys.write_some(false, text.data(), text.size(), error);
  if (!error && text.find_first_not_of(" \t\r\n", used) != text.npos) {
    used = text.find_first_not_of(" \t\r\n", used);
    error = json::make_error_code(json::error::extra_data);
  }
  if (error) {
    throw JsonError(Errc::bad_argument,
                    where + " is not JSON at " + place(text, used) + ": " + error.message());
  }
  if (!keys.handler().found().empty()) {
    throw JsonError(Errc::bad_argument,
                    where + " has the key '" + keys.handler().found() + "' twice in one object");
  }
  return json::parse(text);
}

void JsonReader::fail(const std::string& what) const {
  throw JsonError(Errc::bad_argument, path_ + " " + what);
}

JsonReader JsonReader::at(std::string_view key) const {
  if (auto member = find(key)) {
    return *member;
  }
  fail("lacks '" + std::string(key) + "'");
}

std::optional<JsonReader> JsonReader::find(std::string_view key) const {
  if (!value_->is_object()) {
    fail("must be an object");
  }
  const json::value* member = value_->get_object().if_contains(key);
  if (member == nullptr) {
    return std::nullopt;
  }
  return JsonReader(*member,
                    path_ + (path_.find(": ") == path_.npos ? ": " : ".") + std::string(key));
}

void JsonReader::allow_keys(std::initializer_list<std::string_view> keys) const {
  for (const auto& [key, member] : members()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      std::string choices;
      for (const std::string_view choice : keys) {
        choices += (choices.empty() ? "" : ", ") + std::string(choice);
      }
      fail("has the unknown key '" + key + "'; the choices are " + choices);
    }
  }
}

std::vector<JsonReader> JsonReader::items() const {
  if (!value_->is_array()) {
    fail("must be a list");
  }
  std::vector<JsonReader> items;
  for (const json::value& item : value_->get_array()) {
    items.emplace_back(item, path_ + "[" + std::to_string(items.size()) + "]");
  }
  return items;
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  if (!value_->is_object()) {
    fail("must be an object");
  }
  std::vector<std::pair<std::string, JsonReader>> members;
  for (const auto& member : value_->get_object()) {
    members.emplace_back(std::string(member.key()), *find(member.key()));
  }
  return members;
}

std::string_view JsonReader::string() const {
  if (!value_->is_string()) {
    fail("must be a text");
  }
  const json::string& text = value_->get_string();
  return {text.data(), text.size()};
}

bool JsonReader::boolean() const {
  if (!value_->is_bool()) {
    fail("must be true or false");
  }
  return value_->get_bool();
}

std::int64_t JsonReader::integer() const {
  if (value_->is_int64()) {
    return value_->get_int64();
  }
  fail(value_->is_uint64() ? "is above 2^63-1" : "must be a whole number");
}

double JsonReader::number() const {
  if (!value_->is_number()) {
    fail("must be a number");
  }
  return value_->to_number<double>();
}

}  // namespace m2n
