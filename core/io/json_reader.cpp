// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/json_reader.hpp"

#include <algorithm>
#include <boost/json/parse.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "core/io/json_events.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

/// Finds keys that an object has twice: a document tree keeps one of them silently.
class DuplicateKeys final : public JsonEvents {
 public:
  const std::string& found() const noexcept { return found_; }

  void begin_object() override { keys_.emplace_back(); }
  void end_object() override { keys_.pop_back(); }
  void begin_array() override {}
  void end_array() override {}
  void key(std::string_view name) override {
    if (!keys_.back().emplace(name).second && found_.empty()) {
      found_ = name;
    }
  }
  void string(std::string_view) override {}
  void number(std::string_view) override {}
  void constant(std::string_view) override {}

 private:
  std::vector<std::set<std::string, std::less<>>> keys_;  // of the objects that are open
  std::string found_;
};

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
  DuplicateKeys keys;
  try {
    read_json(text, where, keys);
  } catch (const Error& error) {
    throw JsonError(error.code(), error.what());
  }
  if (!keys.found().empty()) {
    throw JsonError(Errc::bad_argument,
                    where + " has the key '" + keys.found() + "' twice in one object");
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
  // The parser makes these of what int64 cannot hold, programs of any unsigned variable.
  if (const std::uint64_t* const large = value_->if_uint64();
      large != nullptr && std::in_range<std::int64_t>(*large)) {
    return static_cast<std::int64_t>(*large);
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
