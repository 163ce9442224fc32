// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The control plane over HTTP, the client's side.

#include <chrono>
#include <memory>
#include <string>

#include "core/control/control.hpp"

namespace m2n {

struct HttpClientOptions {
  std::string token{};  ///< Empty: no Authorization header is sent.
  /// How long a server that does not listen yet is waited for.
  std::chrono::milliseconds connect_time{10'000};
  std::uint64_t max_answer_bytes = std::uint64_t{64} << 20U;
};

/// @param url  "http://host:port" or with a path before the calls' names: "http://host:port/v1".
/// @throws Error{usage} for any other URL.
std::unique_ptr<ControlClient> make_http_client(const std::string& url,
                                                HttpClientOptions options = {});

}  // namespace m2n
