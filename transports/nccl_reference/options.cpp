// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_reference/options.hpp"

#include <charconv>

#include "core/error.hpp"

namespace m2n::nccl_reference {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& text,
                         const std::string& right) {
  throw Error(Errc::usage, std::string(kWho) + ": " + key + " '" + text + "', expected " + right);
}

std::uint64_t number(const std::string& key, const std::string& text, std::uint64_t low,
                     std::uint64_t high) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    refuse(key, text, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

bool one_of(const std::string& key, const std::string& text, const std::string& yes,
            const std::string& no) {
  if (text != yes && text != no) {
    refuse(key, text, yes + " or " + no);
  }
  return text == yes;
}

}  // namespace

std::string to_string(Method method) {
  switch (method) {
    case Method::packed:
      return "packed";
    case Method::broadcast:
      return "broadcast";
    case Method::group:
      return "group";
    case Method::calls:
      break;
  }
  return "calls";
}

ReferenceOptions ReferenceOptions::parse(const Options& options) {
  require_known_options(kWho, options,
                        {"method", "pack_bytes", "unpack", "registered", "device", "stream"});
  ReferenceOptions out;
  for (const auto& [key, text] : options) {
    if (key == "method") {
      bool known = false;
      for (const Method method :
           {Method::packed, Method::broadcast, Method::group, Method::calls}) {
        if (text == to_string(method)) {
          out.method = method;
          known = true;
        }
      }
      if (!known) {
        refuse(key, text, "packed, broadcast, group or calls");
      }
    } else if (key == "pack_bytes") {
      out.pack_bytes = number(key, text, 1, 1ULL << 60);
    } else if (key == "unpack") {
      out.fused_unpack = one_of(key, text, "fused", "each");
    } else if (key == "registered") {
      out.registered = one_of(key, text, "on", "off");
    } else if (key == "device") {
      out.device = static_cast<int>(number(key, text, 0, 1 << 20));
    } else {
      out.stream = number(key, text, 0, UINT64_MAX);
    }
  }
  return out;
}

std::string ReferenceOptions::shared() const {
  return "method=" + to_string(method) + " pack_bytes=" + std::to_string(pack_bytes);
}

}  // namespace m2n::nccl_reference
