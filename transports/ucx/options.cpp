// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/options.hpp"

#include <charconv>

#include "core/error.hpp"

namespace m2n::ucx {
namespace {

constexpr std::string_view kWho = "transport 'ucx'";

/// @param or_else  What may stand there besides: "auto or ".
std::uint64_t number(const std::string& key, const std::string& text, std::uint64_t low,
                     std::uint64_t high, const char* or_else = "") {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    throw Error(Errc::usage, std::string(kWho) + ": " + key + " '" + text + "', expected " +
                                 or_else + "a whole number from " + std::to_string(low) + " to " +
                                 std::to_string(high));
  }
  return value;
}

[[noreturn]] void unknown_choice(const std::string& key, const std::string& text,
                                 const char* choices) {
  throw Error(Errc::usage, std::string(kWho) + ": " + key + " '" + text + "', expected " + choices);
}

ErrorChoice error_choice(const std::string& text) {
  if (text == "auto") {
    return ErrorChoice::automatic;
  }
  if (text == "peer") {
    return ErrorChoice::peer;
  }
  if (text == "kernel") {
    return ErrorChoice::kernel;
  }
  unknown_choice("errors", text, "auto, peer or kernel");
}

PutChoice put_choice(const std::string& text) {
  if (text == "auto") {
    return PutChoice::automatic;
  }
  if (text == "on") {
    return PutChoice::on;
  }
  if (text == "off") {
    return PutChoice::off;
  }
  unknown_choice("puts", text, "auto, on or off");
}

}  // namespace

UcxOptions UcxOptions::parse(const Options& options) {
  require_known_options(
      kWho, options,
      {"put_bytes", "piece_bytes", "window_bytes", "chunk_bytes", "slot_bytes", "ring_bytes",
       "errors", "tls", "net_devices", "rails", "threads", "keepalive_ms", "puts", "spin_us",
       "device_slot_bytes", "device_ring_bytes", "device_put_bytes", "slow_lanes"});
  UcxOptions out;
  constexpr std::uint64_t kAny = 1ULL << 60;
  constexpr std::uint64_t kPage = 4096;
  for (const auto& [key, text] : options) {
    if (key == "put_bytes") {
      out.put_bytes =
          text == "auto" ? std::nullopt : std::optional(number(key, text, 1, kAny, "auto or "));
    } else if (key == "piece_bytes") {
      out.piece_bytes = number(key, text, kPage, kAny);
    } else if (key == "window_bytes") {
      out.window_bytes = number(key, text, kPage, kAny);
    } else if (key == "chunk_bytes") {
      out.chunk_bytes = number(key, text, 64, 1ULL << 30);
    } else if (key == "slot_bytes") {
      out.slot_bytes = number(key, text, kPage, 1ULL << 30);
    } else if (key == "ring_bytes") {
      out.ring_bytes = number(key, text, kPage, kAny);
    } else if (key == "device_slot_bytes") {
      out.device_slot_bytes = number(key, text, kPage, 1ULL << 30);
    } else if (key == "device_ring_bytes") {
      out.device_ring_bytes = number(key, text, kPage, kAny);
    } else if (key == "device_put_bytes") {
      out.device_put_bytes = number(key, text, 1, kAny);
    } else if (key == "slow_lanes") {
      if (text != "allow" && text != "refuse") {
        unknown_choice(key, text, "refuse or allow");
      }
      out.slow_lanes = text == "allow";
    } else if (key == "errors") {
      out.errors = error_choice(text);
    } else if (key == "puts") {
      out.puts = put_choice(text);
    } else if (key == "tls") {
      out.tls = text;
    } else if (key == "net_devices") {
      out.net_devices = text;
    } else if (key == "rails") {
      out.rails = static_cast<int>(number(key, text, 1, 64));
    } else if (key == "keepalive_ms") {
      out.keepalive = std::chrono::milliseconds(number(key, text, 1, 1 << 30));
    } else if (key == "spin_us") {
      out.spin = std::chrono::microseconds(number(key, text, 0, 1'000'000));
    } else if (key == "threads") {
      if (text != "multi" && text != "serialized") {
        unknown_choice(key, text, "serialized or multi");
      }
      out.threads = text == "multi";
    }
  }
  return out;
}

std::string UcxOptions::shared() const {
  return "put_bytes=" + (put_bytes ? std::to_string(*put_bytes) : "auto") +
         " chunk_bytes=" + std::to_string(chunk_bytes) +
         " errors=" + std::to_string(static_cast<int>(errors));
}

}  // namespace m2n::ucx
