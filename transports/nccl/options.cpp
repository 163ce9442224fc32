// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/options.hpp"

#include <charconv>

#include "core/error.hpp"

namespace m2n::nccl {
namespace {

constexpr std::string_view kWho = "transport 'nccl'";

std::uint64_t number(const std::string& key, const std::string& text, std::uint64_t low,
                     std::uint64_t high) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    throw Error(Errc::usage, std::string(kWho) + ": " + key + " '" + text +
                                 "', expected a whole number from " + std::to_string(low) + " to " +
                                 std::to_string(high));
  }
  return value;
}

}  // namespace

NcclOptions NcclOptions::parse(const Options& options) {
  require_known_options(
      kWho, options,
      {"path", "device", "staging_bytes", "direct_bytes", "step_bytes", "engine_min_bytes",
       "engine_max_copies", "engine_gap_bytes", "engine_host_us", "blocks", "graph", "stream"});
  NcclOptions out;
  constexpr std::uint64_t kAny = UINT64_MAX;
  for (const auto& [key, text] : options) {
    if (key == "path") {
      out.path = path_choice_from_string(text);
    } else if (key == "device") {
      out.device = static_cast<int>(number(key, text, 0, 1 << 20));
    } else if (key == "staging_bytes") {
      out.staging_bytes = number(key, text, 64 << 10, 1ULL << 60);
    } else if (key == "direct_bytes") {
      out.direct_bytes = number(key, text, 1, kAny);
    } else if (key == "step_bytes") {
      out.step_bytes = number(key, text, 1 << 20, kAny);
    } else if (key == "engine_min_bytes") {
      out.engine.min_bytes = number(key, text, 1, kAny);
    } else if (key == "engine_max_copies") {
      out.engine.max_copies = number(key, text, 0, kAny);
    } else if (key == "engine_gap_bytes") {
      out.engine.gap_bytes = number(key, text, 0, 1ULL << 40);
    } else if (key == "engine_host_us") {
      out.engine.host_us = static_cast<double>(number(key, text, 0, 1ULL << 40));
    } else if (key == "blocks") {
      out.blocks = static_cast<int>(number(key, text, 1, 1 << 16));
    } else if (key == "stream") {
      out.stream = number(key, text, 0, kAny);
    } else if (key == "graph") {
      if (text != "on" && text != "off" && text != "auto") {
        throw Error(Errc::usage,
                    std::string(kWho) + ": graph '" + text + "', expected auto, on or off");
      }
      out.graph = text == "auto" ? GraphChoice::automatic
                  : text == "on" ? GraphChoice::on
                                 : GraphChoice::off;
    }
  }
  return out;
}

std::string NcclOptions::shared() const {
  return "path=" + std::to_string(static_cast<int>(path)) +
         " staging_bytes=" + std::to_string(staging_bytes) +
         " direct_bytes=" + std::to_string(direct_bytes) +
         " step_bytes=" + std::to_string(step_bytes);
}

}  // namespace m2n::nccl
