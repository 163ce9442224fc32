// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/options.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <initializer_list>
#include <optional>

#include "core/error.hpp"

namespace m2n::nccl_m2n {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& text,
                         const std::string& right) {
  throw Error(Errc::usage, std::string(kWho) + ": " + key + " '" + text + "', expected " + right);
}

std::optional<std::uint64_t> whole(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

std::uint64_t number(const std::string& key, const std::string& text, std::uint64_t low,
                     std::uint64_t high) {
  const auto value = whole(text);
  if (!value || *value < low || *value > high) {
    refuse(key, text, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return *value;
}

std::string choice(const std::string& key, const std::string& text,
                   std::initializer_list<std::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    std::string right;
    for (const std::string_view known : choices) {
      right += (right.empty() ? "" : " or ") + std::string(known);
    }
    refuse(key, text, right);
  }
  return text;
}

/// The largest buffer of "BYTES:SLOTS,...". @throws Error{usage}.
std::uint64_t largest_buffer(const std::string& text) {
  std::uint64_t largest = 0;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view one = std::string_view(text).substr(begin, end - begin);
    const std::size_t colon = std::min(one.find(':'), one.size());
    const auto bytes = whole(one.substr(0, colon));
    const auto slots = whole(colon < one.size() ? one.substr(colon + 1) : "");
    if (!bytes || !slots || *bytes == 0 || *slots == 0) {
      refuse("staging", text, "BYTES:SLOTS, and more of them after commas");
    }
    largest = std::max(largest, *bytes);
    begin = end + 1;
  }
  return largest;
}

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

}  // namespace

M2nOptions M2nOptions::parse(const Options& options) {
  require_known_options(kWho, options,
                        {"library", "path", "grouped", "internal_streams", "staging", "algorithm",
                         "balance", "pipe_network", "ctas", "chunk_bytes", "staging_channels",
                         "staging_channel_bytes", "staging_chunk_bytes", "device", "stream"});
  constexpr std::uint64_t kAny = UINT64_MAX;
  M2nOptions out;
  for (const auto& [key, text] : options) {
    if (key == "library") {
      out.library = text;
    } else if (key == "path") {
      out.path = choice(key, text, {"pack", "direct", "pipe"});
    } else if (key == "grouped") {
      out.grouped = choice(key, text, {"on", "off"}) == "on";
    } else if (key == "internal_streams") {
      out.internal_streams = choice(key, text, {"on", "off"});
    } else if (key == "staging") {
      largest_buffer(text);
      out.staging = text;
    } else if (key == "algorithm") {
      out.algorithm = choice(key, text, {"auto", "ring", "direct"});
    } else if (key == "balance") {
      out.balance = choice(key, text, {"uniform", "node_aware"});
    } else if (key == "pipe_network") {
      out.pipe_network = choice(key, text, {"device", "host_rma"});
    } else if (key == "ctas") {
      out.ctas = number(key, text, 1, 1 << 16);
    } else if (key == "chunk_bytes") {
      out.chunk_bytes = number(key, text, 1, kAny);
    } else if (key == "staging_channels") {
      out.staging_channels = number(key, text, 1, 1 << 16);
    } else if (key == "staging_channel_bytes") {
      out.staging_channel_bytes = number(key, text, 1, kAny);
    } else if (key == "staging_chunk_bytes") {
      out.staging_chunk_bytes = number(key, text, 1, kAny);
    } else if (key == "device") {
      out.device = static_cast<int>(number(key, text, 0, 1 << 20));
    } else {
      out.stream = number(key, text, 0, kAny);
    }
  }
  return out;
}

std::map<std::string, std::string> M2nOptions::variables() const {
  std::map<std::string, std::string> out = {{"NCCL_RESHARD_COPY_ALGORITHM", upper(path)}};
  const auto set = [&](const char* name, const std::string& value) {
    if (!value.empty()) {
      out[name] = value;
    }
  };
  const auto number_of = [](std::uint64_t value) {
    return value == 0 ? std::string() : std::to_string(value);
  };
  set("NCCL_RESHARD_USE_INTERNAL_STREAMS", internal_streams);
  set("NCCL_RESHARD_PACK_BUFFSIZES", staging);
  set("NCCL_RESHARD_ALGORITHM", upper(algorithm));
  set("NCCL_RESHARD_LB_MODE", upper(balance));
  set("NCCL_RESHARD_PIPE_NET_MODE", upper(pipe_network));
  set("NCCL_RESHARD_CHUNK_SIZE", number_of(chunk_bytes));
  set("NCCL_RESHARD_STAGING_NUM_CHANNELS", number_of(staging_channels));
  set("NCCL_RESHARD_STAGING_CHANNEL_SIZE", number_of(staging_channel_bytes));
  set("NCCL_RESHARD_STAGING_CHUNK_SIZE", number_of(staging_chunk_bytes));
  return out;
}

Caps M2nOptions::caps(bool one_host) const {
  Caps caps;
  const bool direct = path == "direct" || (path == "pack" && one_host && !grouped);
  if (!direct) {
    caps.sources = 16;
  }
  if (path != "pack") {
    caps.staging_bytes = UINT64_MAX;  // staged in chunks
  } else if (!staging.empty()) {
    caps.staging_bytes = largest_buffer(staging);
  }
  return caps;
}

std::string M2nOptions::shared() const {
  std::string text = grouped ? "grouped=on" : "grouped=off";
  for (const auto& [name, value] : variables()) {
    text += " " + name + "=" + value;
  }
  return text;
}

}  // namespace m2n::nccl_m2n
