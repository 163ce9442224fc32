// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n inspect`: what a checkpoint or a dump holds.

#include <array>
#include <boost/json.hpp>
#include <fstream>
#include <iostream>

#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/error.hpp"
#include "core/io/dump.hpp"
#include "core/io/safetensors.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

/// HDF5 files begin with these bytes (HDF5 file format specification 3.0, section II.A).
bool is_hdf5(const std::filesystem::path& file) {
  static constexpr std::array<char, 8> kSignature = {'\x89', 'H',  'D',    'F',
                                                     '\r',   '\n', '\x1a', '\n'};
  std::array<char, 8> start{};
  std::ifstream stream(file, std::ios::binary);
  stream.read(start.data(), static_cast<std::streamsize>(start.size()));
  return stream && start == kSignature;
}

void inspect_checkpoint(const std::filesystem::path& path, bool as_json) {
  const Checkpoint checkpoint(path);
  Table table({"tensor", "dtype", "shape", "bytes"});
  json::array list;
  std::uint64_t total = 0;
  for (const TensorInfo& info : checkpoint.catalogue()) {
    const std::uint64_t bytes = stored_bytes(info);
    total += bytes;
    table.add({info.name, std::string(to_string(info.dtype)), to_string(info.shape),
               std::to_string(bytes)});
    json::array shape;
    for (const Index extent : info.shape) {
      shape.emplace_back(extent);
    }
    list.push_back(json::object{{"name", info.name},
                                {"dtype", to_string(info.dtype)},
                                {"shape", std::move(shape)},
                                {"bytes", bytes}});
  }
  if (as_json) {
    std::cout << json::serialize(json::object{{"format", "safetensors"},
                                              {"files", checkpoint.files().size()},
                                              {"bytes", total},
                                              {"tensors", std::move(list)}})
              << '\n';
    return;
  }
  std::cout << table.text() << '\n'
            << checkpoint.catalogue().size() << " tensors, " << human_bytes(total) << ", in "
            << checkpoint.files().size()
            << (checkpoint.files().size() == 1 ? " file\n" : " files\n");
}

}  // namespace

int inspect_command(const Arguments& arguments) {
  bool as_json = false;
  std::string path;
  for (const std::string& word : arguments) {
    if (word == "--json") {
      as_json = true;
    } else if (word.rfind("--", 0) == 0) {
      throw Error(Errc::usage, "inspect has no flag " + word + "; it has --json");
    } else if (!path.empty()) {
      throw Error(Errc::usage, "'" + word + "' is one file too many; inspect takes one");
    } else {
      path = word;
    }
  }
  if (path.empty()) {
    throw Error(Errc::usage, "inspect needs a file: a checkpoint or a dump");
  }
  if (is_hdf5(path)) {
    std::cout << describe_dump(path, as_json);
  } else {
    inspect_checkpoint(path, as_json);
  }
  return 0;
}

}  // namespace m2n::cli
