// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/json_events.hpp"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/error.hpp>
#include <boost/json/serialize.hpp>
#include <cstddef>
#include <cstdint>

#include "core/error.hpp"

namespace m2n {
namespace {

/// Length of the UTF-8 sequence at the start of @p text, or 0 when it is not one (RFC 3629:
/// shortest form, no surrogates, nothing above U+10FFFF).
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) {
    return 1;
  }
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0u) != 0x80) {
      return 0;
    }
  }
  const unsigned second = byte(1);
  const bool legal = !(lead == 0xe0 && second < 0xa0) && !(lead == 0xed && second > 0x9f) &&
                     !(lead == 0xf0 && second < 0x90) && !(lead == 0xf4 && second > 0x8f);
  return legal ? length : 0;
}

[[noreturn]] void fail(std::string_view text, const std::string& where, const std::string& what,
                       std::size_t position) {
  const std::string_view before = text.substr(0, position);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t line_break = before.rfind('\n');
  const std::size_t column = line_break == before.npos ? position + 1 : position - line_break;
  throw Error(Errc::bad_argument, where + " " + what + " at line " + std::to_string(line) +
                                      ", column " + std::to_string(column));
}

void check_utf8(std::string_view text, const std::string& where) {
  std::size_t position = 0;
  while (position < text.size()) {
    const std::size_t length = utf8_length(text.substr(position));
    if (length == 0) {
      fail(text, where, "is not UTF-8", position);
    }
    position += length;
  }
}

/// What boost::json::basic_parser calls. It hands strings and numbers over in parts.
class Handler {
 public:
  static constexpr std::size_t max_object_size = SIZE_MAX;  // NOLINT: names of the library
  static constexpr std::size_t max_array_size = SIZE_MAX;   // NOLINT
  static constexpr std::size_t max_key_size = SIZE_MAX;     // NOLINT
  static constexpr std::size_t max_string_size = SIZE_MAX;  // NOLINT

  explicit Handler(JsonEvents& events) : events_(events) {}

  using Code = boost::json::error_code;
  using Text = boost::json::string_view;

  bool on_document_begin(Code&) { return true; }
  bool on_document_end(Code&) { return true; }
  bool on_object_begin(Code&) {
    events_.begin_object();
    return true;
  }
  bool on_object_end(std::size_t, Code&) {
    events_.end_object();
    return true;
  }
  bool on_array_begin(Code&) {
    events_.begin_array();
    return true;
  }
  bool on_array_end(std::size_t, Code&) {
    events_.end_array();
    return true;
  }
  bool on_key_part(Text part, std::size_t, Code&) { return add(part); }
  bool on_key(Text rest, std::size_t, Code&) {
    events_.key(whole(rest));
    parts_.clear();
    return true;
  }
  bool on_string_part(Text part, std::size_t, Code&) { return add(part); }
  bool on_string(Text rest, std::size_t, Code&) {
    events_.string(whole(rest));
    parts_.clear();
    return true;
  }
  bool on_number_part(Text part, Code&) { return add(part); }
  bool on_int64(std::int64_t, Text rest, Code&) { return number(rest); }
  bool on_uint64(std::uint64_t, Text rest, Code&) { return number(rest); }
  bool on_double(double, Text rest, Code&) { return number(rest); }
  bool on_bool(bool value, Code&) {
    events_.constant(value ? "true" : "false");
    return true;
  }
  bool on_null(Code&) {
    events_.constant("null");
    return true;
  }
  bool on_comment_part(Text, Code&) { return true; }
  bool on_comment(Text, Code&) { return true; }

 private:
  bool add(Text part) {
    parts_.append(part.data(), part.size());
    return true;
  }
  std::string_view whole(Text rest) {
    if (parts_.empty()) {
      return {rest.data(), rest.size()};
    }
    add(rest);
    return parts_;
  }
  bool number(Text rest) {
    events_.number(whole(rest));
    parts_.clear();
    return true;
  }

  JsonEvents& events_;
  std::string parts_;
};

}  // namespace

void read_json(std::string_view text, const std::string& where, JsonEvents& events) {
  check_utf8(text, where);
  boost::json::basic_parser<Handler> parser(boost::json::parse_options{}, events);
  boost::json::error_code code;
  std::size_t used = parser.write_some(false, text.data(), text.size(), code);
  if (code == boost::json::error::too_deep) {
    fail(text, where, "is nested deeper than 32 levels", used);
  }
  if (code) {
    fail(text, where, "is not JSON (" + code.message() + ")", used);
  }
  used = text.find_first_not_of(" \t\r\n", used);
  if (used != std::string_view::npos) {
    fail(text, where, "goes on after its JSON value", used);
  }
}

std::string json_quoted(std::string_view text) { return boost::json::serialize(text); }

std::string message_quoted(std::string_view name) {
  constexpr std::size_t kLongest = 200;
  std::string out = "'";
  const std::string_view shown = name.substr(0, kLongest);
  for (std::size_t i = 0; i < shown.size();) {
    const std::size_t length = utf8_length(shown.substr(i));
    const auto byte = static_cast<unsigned char>(shown[i]);
    if (length == 0 || byte < 0x20 || byte == 0x7f) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15u]};
      ++i;
    } else {
      out += shown.substr(i, length);
      i += length;
    }
  }
  return out + (name.size() > kLongest ? "...'" : "'");
}

}  // namespace m2n
