// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/io/atomic_file.hpp"
#include "core/io/json_events.hpp"
#include "core/io/safetensors.hpp"

namespace m2n {
namespace {

namespace fs = std::filesystem;

using Tensors = std::vector<const TensorToWrite*>;

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

/// The header of @p tensors in their order, padded so that the data begins at a multiple of 8.
std::string header_of(const Tensors& tensors, const SafetensorsMetadata& metadata) {
  std::string text = "{";
  const char* separator = "";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      text += separator + json_quoted(key) + ":" + json_quoted(value);
      separator = ",";
    }
    text += "}";
  }
  std::uint64_t begin = 0;
  for (const TensorToWrite* tensor : tensors) {
    const TensorInfo& info = tensor->info;
    const std::uint64_t end = checked_add_bytes(begin, stored_bytes(info), "file size");
    text += separator + json_quoted(info.name) + ":{\"dtype\":\"" +
            std::string(safetensors_name(info.dtype)) + "\",\"shape\":[";
    separator = "";
    for (const Index extent : info.shape) {
      text += separator + std::to_string(extent);
      separator = ",";
    }
    text += "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
    separator = ",";
    begin = end;
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

/// Writes @p tensors into @p file, without giving it its name yet.
void write_tensors(AtomicFile& file, Tensors tensors, const SafetensorsMetadata& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return a->info.dtype != b->info.dtype ? a->info.dtype > b->info.dtype
                                          : a->info.name < b->info.name;
  });
  const std::string header = header_of(tensors, metadata);
  const std::string path = file.target().string();
  if (header.size() > kMaxSafetensorsHeaderBytes) {
    throw Error(Errc::bad_argument, message_quoted(path) + ": the header would take " +
                                        std::to_string(header.size()) + " bytes; at most " +
                                        std::to_string(kMaxSafetensorsHeaderBytes) +
                                        " are allowed, so write more and smaller files");
  }
  std::uint64_t data_bytes = 0;
  for (const TensorToWrite* tensor : tensors) {
    data_bytes += stored_bytes(tensor->info);  // header_of() has checked the sum
  }
  // What the reader refuses is not written: repeated names, control characters, bad UTF-8.
  parse_safetensors_header(header, data_bytes, path);

  std::string length;
  for (unsigned i = 0; i < 8; ++i) {
    length += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  }
  file.write(length);
  file.write(header);
  for (const TensorToWrite* tensor : tensors) {
    if (!tensor->load) {
      file.write({tensor->data, stored_bytes(tensor->info)});
      continue;
    }
    const std::vector<std::byte> bytes = tensor->load();
    if (bytes.size() != stored_bytes(tensor->info)) {
      throw Error(Errc::bad_argument, "tensor " + message_quoted(tensor->info.name) +
                                          " came with " + std::to_string(bytes.size()) +
                                          " bytes instead of " +
                                          std::to_string(stored_bytes(tensor->info)));
    }
    file.write(bytes);
  }
}

/// Cuts @p tensors into files, greedily and in order; a tensor above the limit is alone.
std::vector<Tensors> shards_of(std::span<const TensorToWrite> tensors, std::uint64_t limit) {
  std::vector<Tensors> shards;
  Tensors current;
  std::uint64_t current_bytes = 0;
  for (const TensorToWrite& tensor : tensors) {
    const std::uint64_t bytes = stored_bytes(tensor.info);
    if (bytes > limit) {
      shards.push_back({&tensor});
      continue;
    }
    if (bytes > limit - current_bytes) {
      shards.push_back(std::exchange(current, {}));
      current_bytes = 0;
    }
    current.push_back(&tensor);
    current_bytes += bytes;
  }
  if (!current.empty() || shards.empty()) {
    shards.push_back(std::move(current));
  }
  return shards;
}

/// "model-00001-of-00003.safetensors" for the first of three.
std::string shard_name(std::size_t index, std::size_t count) {
  const auto five_digits = [](std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return "model-" + five_digits(index + 1) + "-of-" + five_digits(count) + ".safetensors";
}

/// Two forms in one folder would leave its readers a choice.
void refuse_other_form(const fs::path& folder, const char* other) {
  std::error_code ignored;
  if (fs::exists(folder / other, ignored)) {
    throw Error(Errc::bad_argument, "the folder " + message_quoted(folder.string()) +
                                        " already holds a checkpoint as " + other +
                                        "; remove it or choose another folder");
  }
}

}  // namespace

void write_safetensors(const fs::path& path, std::span<const TensorToWrite> tensors,
                       const SafetensorsMetadata& metadata) {
  Tensors all;
  for (const TensorToWrite& tensor : tensors) {
    all.push_back(&tensor);
  }
  AtomicFile file(path);
  write_tensors(file, std::move(all), metadata);
  file.commit();
}

void write_checkpoint(const fs::path& folder, std::span<const TensorToWrite> tensors,
                      std::uint64_t shard_bytes, const SafetensorsMetadata& metadata) {
  const std::vector<Tensors> shards = shards_of(tensors, shard_bytes);
  const bool single = shards.size() == 1;
  refuse_other_form(folder, single ? kIndexName : kSingleName);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw Error(Errc::io, "cannot create the folder '" + folder.string() + "': " + error.message());
  }
  if (single) {
    write_safetensors(folder / kSingleName, tensors, metadata);
    return;
  }

  std::map<std::string, std::string> file_of_tensor;
  std::uint64_t total_bytes = 0;
  std::vector<AtomicFile> files;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    for (const TensorToWrite* tensor : shards[i]) {
      if (!file_of_tensor.emplace(tensor->info.name, name).second) {
        throw Error(Errc::bad_argument, "tensor " + message_quoted(tensor->info.name) +
                                            " is given twice; a checkpoint holds it once");
      }
      total_bytes = checked_add_bytes(total_bytes, stored_bytes(tensor->info), "checkpoint size");
    }
    files.emplace_back(folder / name);
    write_tensors(files.back(), shards[i], metadata);
  }
  std::string text = "{\n  \"metadata\": {\"total_size\": " + std::to_string(total_bytes) +
                     "},\n  \"weight_map\": {";
  const char* separator = "\n    ";
  for (const auto& [tensor, file] : file_of_tensor) {
    text += separator + json_quoted(tensor) + ": " + json_quoted(file);
    separator = ",\n    ";
  }
  text += "\n  }\n}\n";
  AtomicFile index(folder / kIndexName);
  index.write(text);
  // Without an index nobody takes a mixture of old and new files for a checkpoint.
  fs::remove(folder / kIndexName, error);
  for (AtomicFile& file : files) {
    file.commit();
  }
  index.commit();
}

}  // namespace m2n
