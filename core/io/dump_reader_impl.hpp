// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the parts of DumpReader share. Not installed.

#include <string>
#include <vector>

#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"

namespace m2n {

struct DumpReader::Impl {
  std::filesystem::path path;
  h5::File file;
  std::uint32_t schema_version = 0;
};

/// @return why the dataset's bytes cannot be trusted, or nothing.
std::string damage(const h5::Dataset& dataset);

/// @throws Error{io} naming a part of @p dump that is missing, no dump, or of another run.
void expect_parts(const std::filesystem::path& dump, const std::vector<std::string>& parts,
                  const std::string& run_id);

}  // namespace m2n
