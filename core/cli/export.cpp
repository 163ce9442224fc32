// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n export`: the tensors of a dump as a checkpoint.

#include <charconv>
#include <iostream>
#include <optional>

#include "core/cli/commands.hpp"
#include "core/cli/output.hpp"
#include "core/error.hpp"
#include "core/io/dump_tensors.hpp"
#include "core/io/safetensors.hpp"

namespace m2n::cli {
namespace {

struct Request {
  std::vector<std::filesystem::path> files;
  Role side = Role::destination;
  std::optional<Rank> rank;
};

Request parse(const Arguments& arguments) {
  Request request;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (!word.starts_with("--")) {
      request.files.emplace_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    if (flag != "--side" && flag != "--rank") {
      throw Error(Errc::usage, "export has no flag " + flag + "; it has --side and --rank");
    }
    if (equals == word.npos && i + 1 == arguments.size()) {
      throw Error(Errc::usage, "flag " + flag + " needs a value");
    }
    const std::string value = equals == word.npos ? arguments[++i] : word.substr(equals + 1);
    if (flag == "--rank") {
      Rank rank = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), rank);
      if (error != std::errc{} || end != value.data() + value.size() || rank < 0) {
        throw Error(Errc::usage, "--rank is '" + value + "', which is no rank");
      }
      request.rank = rank;
    } else if (value == "source" || value == "destination") {
      request.side = value == "source" ? Role::source : Role::destination;
    } else {
      throw Error(Errc::usage, "--side is '" + value + "'; the choices are destination, source");
    }
  }
  if (request.files.size() != 2) {
    throw Error(Errc::usage, "export needs a dump and where to write to, and has " +
                                 std::to_string(request.files.size()) + " names");
  }
  return request;
}

/// Read when they are written, one at a time.
std::vector<TensorToWrite> tensors_of(const DumpTensors& tensors, std::optional<Rank> rank) {
  std::vector<TensorToWrite> out;
  for (const TensorInfo& info : tensors.catalogue()) {
    if (!rank) {
      out.push_back({info, nullptr, [&tensors, &info] {
                       std::vector<std::byte> bytes(stored_bytes(info));
                       tensors.read(info.name, Box::whole(info.shape), bytes.data(),
                                    row_major(info.shape));
                       return bytes;
                     }});
      continue;
    }
    for (const DumpShard& shard : tensors.shards(info.name)) {
      if (shard.rank == *rank) {
        out.push_back({{info.name, info.dtype, shard.compact.local_shape},
                       nullptr,
                       [&tensors, &shard] { return tensors.read(shard); }});
      }
    }
  }
  return out;
}

}  // namespace

int export_command(const Arguments& arguments) {
  const Request request = parse(arguments);
  const DumpTensors tensors(request.files[0], request.side);
  const std::vector<TensorToWrite> list = tensors_of(tensors, request.rank);
  if (list.empty()) {
    throw Error(Errc::bad_argument,
                "'" + request.files[0].string() + "' has no shards of the " +
                    std::string(to_string(request.side)) +
                    (request.rank ? " on rank " + std::to_string(*request.rank) : std::string()));
  }
  SafetensorsMetadata metadata{{"format", "pt"},
                               {"m2n_side", std::string(to_string(request.side))}};
  if (request.rank) {
    metadata.emplace("m2n_rank", std::to_string(*request.rank));
  }
  std::uint64_t bytes = 0;
  for (const TensorToWrite& tensor : list) {
    bytes += stored_bytes(tensor.info);
  }
  const std::filesystem::path& out = request.files[1];
  if (out.extension() == ".safetensors") {
    write_safetensors(out, list, metadata);
  } else {
    constexpr std::uint64_t kFileBytes = 5'000'000'000;
    write_checkpoint(out, list, kFileBytes, metadata);
  }
  std::cout << list.size() << " tensors, " << human_bytes(bytes) << ", in " << out.string() << '\n';
  return 0;
}

}  // namespace m2n::cli
