// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The sizes of published models, built in from experiments/models.

#include <string_view>
#include <vector>

namespace m2n::cli {

struct PublishedModel {
  std::string_view name;    ///< Of the file: "qwen3-8b".
  std::string_view config;  ///< A config.json.
};

/// By name.
const std::vector<PublishedModel>& published_models();

}  // namespace m2n::cli
