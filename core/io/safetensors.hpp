// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Checkpoints in the safetensors format: one file, or several with an index. Read leniently
/// (white space around the header, any alignment, any order), written strictly.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/api/values.hpp"
#include "core/io/mapped_file.hpp"

namespace m2n {

/// Largest header, for reader and writer.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
/// Largest offset that a header may hold.
inline constexpr std::uint64_t kMaxSafetensorsOffset = std::uint64_t{1} << 48;

/// The `__metadata__` of a file.
using SafetensorsMetadata = std::map<std::string, std::string>;

/// Bytes of a tensor in a file; the types below a byte are packed.
/// @throws Error{bad_argument} naming the tensor when they do not fit into 64 bits or are not whole
///         bytes, or when an f4 tensor's last dimension is odd.
std::uint64_t stored_bytes(const TensorInfo& info);

/// A tensor and where it lies in its mapped file.
struct StoredTensor {
  TensorInfo info;
  const std::byte* data = nullptr;  ///< Row-major, any alignment; valid as long as the file object.
  std::uint64_t bytes = 0;
};

/// One safetensors file, mapped: its header is read and checked, its data is paged in when touched.
///
/// - Threads: const calls from several threads.
/// - Errors: Error{io} when the file cannot be opened, Error{bad_argument} when it is malformed;
///   both name the file, and the tensor at fault.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// In the order of their offsets, which need not be the order in the header.
  const std::vector<StoredTensor>& tensors() const noexcept { return tensors_; }
  const SafetensorsMetadata& metadata() const noexcept { return metadata_; }

 private:
  std::filesystem::path path_;
  MappedFile mapping_;
  std::vector<StoredTensor> tensors_;
  SafetensorsMetadata metadata_;
};

/// All tensors of a checkpoint. Threads and errors as for SafetensorsFile.
class Checkpoint {
 public:
  /// @param path  A safetensors file; an index (`*.json`) beside its files; or a folder that holds
  ///              `model.safetensors` or one `*.safetensors.index.json`.
  /// @throws Error{bad_argument} besides, when a folder leaves a choice (naming the files), when
  ///         the index names a file that is not a plain name or does not exist, or when index and
  ///         files disagree about what lies where or about the total size.
  explicit Checkpoint(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// In the order of their names.
  const std::vector<SafetensorsFile>& files() const noexcept { return files_; }
  /// File by file, in the order of files() and their tensors().
  const Catalogue& catalogue() const noexcept { return catalogue_; }
  /// @throws Error{bad_argument} naming checkpoint and tensor.
  const StoredTensor& tensor(std::string_view name) const;

 private:
  void open_index();

  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  Catalogue catalogue_;
  std::unordered_map<std::string_view, const StoredTensor*> by_name_;
};

/// A tensor to be written: compact, row-major, packed if below a byte.
struct TensorToWrite {
  TensorInfo info;
  const std::byte* data = nullptr;
  /// Makes the bytes when they are written, where they are too many to hold all of them: used
  /// instead of data.
  std::function<std::vector<std::byte>()> load = {};
};

/// Writes one file, whole or not at all: tensors by descending dtype and then by name, each
/// naturally aligned. Equal input gives equal bytes.
/// @param metadata  Some readers refuse a file without {"format": "pt"}.
/// @throws Error{bad_argument} naming the tensor for whatever a reader would refuse; Error{io}.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const SafetensorsMetadata& metadata = {{"format", "pt"}});

/// Writes `model.safetensors` into @p folder, or, above @p shard_bytes, as many
/// `model-00001-of-0000n.safetensors` as it takes and then their index. Files are filled in the
/// order of @p tensors; one larger than @p shard_bytes has a file of its own, none is split.
/// @throws Error{bad_argument} besides, when the folder holds a checkpoint of the other form.
void write_checkpoint(const std::filesystem::path& folder, std::span<const TensorToWrite> tensors,
                      std::uint64_t shard_bytes = 5'000'000'000,
                      const SafetensorsMetadata& metadata = {{"format", "pt"}});

/// The inside of a safetensors file: tensors by offset, and metadata. For the writer's own check.
struct SafetensorsHeader {
  struct Tensor {
    TensorInfo info;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  std::vector<Tensor> tensors;
  SafetensorsMetadata metadata;
};
/// Parses and checks @p text, a header without its length, of a file called @p file whose data has
/// @p data_bytes.
/// @throws Error{bad_argument} by every rule but those for the header's length.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& file);

}  // namespace m2n
