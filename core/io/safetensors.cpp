// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <system_error>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"
#include "core/io/json_events.hpp"
#include "core/io/json_reader.hpp"

namespace m2n {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor data is mapped as it lies");

namespace fs = std::filesystem;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::size_t kLengthBytes = 8;

[[noreturn]] void bad_file(const std::string& what) { throw Error(Errc::bad_argument, what); }

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

/// The whole number that @p text is, if it is one without sign, fraction and exponent.
std::optional<std::uint64_t> number_in(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool ok = error == std::errc() && end == text.data() + text.size();
  return ok ? std::optional(value) : std::nullopt;
}

bool has_control_character(std::string_view name) {
  return std::any_of(name.begin(), name.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

/// Builds the header's tensors from its JSON, and refuses what is out of place on sight.
class HeaderEvents : public JsonEvents {
 public:
  explicit HeaderEvents(std::string file) : file_(std::move(file)) {}

  SafetensorsHeader header;

  void begin_object() override {
    if (at_ == At::document) {
      at_ = At::top;
    } else if (at_ == At::metadata) {
      at_ = At::in_metadata;
    } else if (at_ == At::tensor) {
      at_ = At::in_tensor;
    } else {
      refuse("an object");
    }
  }
  void end_object() override {
    if (at_ == At::in_tensor) {
      finish_tensor();
    }
    at_ = At::top;
  }
  void begin_array() override {
    if (at_ == At::shape) {
      at_ = At::in_shape;
    } else if (at_ == At::offsets) {
      at_ = At::in_offsets;
    } else {
      refuse("an array");
    }
  }
  void end_array() override {
    if (at_ == At::in_offsets && offsets_.size() != 2) {
      bad_file(subject() + "data_offsets has " + std::to_string(offsets_.size()) +
               " numbers; it must have two, begin and end");
    }
    at_ = At::in_tensor;
  }
  void key(std::string_view name) override {
    if (at_ == At::top) {
      top_key(name);
    } else if (at_ == At::in_metadata) {
      metadata_key_ = name;
      if (header.metadata.contains(metadata_key_)) {
        bad_file(file_ + ": '__metadata__' has the key " + message_quoted(name) +
                 " twice; keys must differ");
      }
      at_ = At::metadata_text;
    } else {
      tensor_key(name);
    }
  }
  void string(std::string_view value) override {
    if (at_ == At::metadata_text) {
      header.metadata.emplace(metadata_key_, value);
      at_ = At::in_metadata;
    } else if (at_ == At::dtype) {
      tensor_.info.dtype = dtype_named(value);
      at_ = At::in_tensor;
    } else {
      refuse("the string " + message_quoted(value));
    }
  }
  void number(std::string_view text) override {
    if (at_ != At::in_shape && at_ != At::in_offsets) {
      refuse("the number " + std::string(text.substr(0, kShownDigits)));
    }
    const std::optional<std::uint64_t> value = number_in(text);
    if (!value) {
      refuse(std::string(text.substr(0, kShownDigits)));
    }
    if (at_ == At::in_shape) {
      add_extent(*value);
    } else {
      add_offset(*value);
    }
  }
  void constant(std::string_view value) override { refuse(std::string(value)); }

 private:
  /// What comes next. A value: document, metadata, metadata_text, tensor, dtype, shape, offsets.
  /// A key or the end: top, in_metadata, in_tensor. A number or the end: in_shape, in_offsets.
  enum class At {
    document,
    top,
    metadata,
    in_metadata,
    metadata_text,
    tensor,
    in_tensor,
    dtype,
    shape,
    in_shape,
    offsets,
    in_offsets,
  };
  static constexpr std::size_t kShownDigits = 40;

  std::string subject() const {
    return file_ + ": tensor " + message_quoted(tensor_.info.name) + ": ";
  }

  [[noreturn]] void refuse(const std::string& found) const {
    switch (at_) {
      case At::metadata:
        bad_file(file_ + ": '__metadata__' is " + found + "; it must be an object of strings");
      case At::metadata_text:
        bad_file(file_ + ": '__metadata__' has " + found + " for the key " +
                 message_quoted(metadata_key_) +
                 "; its values must be strings, and no tensor can have this name");
      case At::tensor:
        bad_file(subject() + "its value is " + found +
                 "; it must be an object with dtype, shape and data_offsets");
      case At::dtype:
        bad_file(subject() + "dtype is " + found + "; it must be a string such as 'BF16'");
      case At::shape:
        bad_file(subject() + "shape is " + found + "; it must be a list of whole numbers");
      case At::offsets:
        bad_file(subject() + "data_offsets is " + found +
                 "; it must be a list of two whole numbers");
      case At::in_shape:
        bad_file(subject() + "shape holds " + found +
                 "; each extent must be a whole number from 0 to 2^63-1");
      case At::in_offsets:
        bad_file(subject() + "data_offsets holds " + found +
                 "; each offset must be a whole number from 0 to 2^48");
      case At::document:
      case At::top:
      case At::in_metadata:
      case At::in_tensor:
        break;  // in an object the parser lets only keys come
    }
    bad_file(file_ + ": the header is " + found + "; it must be an object");
  }

  DType dtype_named(std::string_view name) const {
    std::string names;
    for (const DType dtype : all_dtypes()) {
      if (safetensors_name(dtype) == name) {
        return dtype;
      }
      names += (names.empty() ? "" : ", ") + std::string(safetensors_name(dtype));
    }
    bad_file(subject() + "unknown dtype " + message_quoted(name) + "; the dtypes are " + names);
  }

  void top_key(std::string_view name) {
    if (!names_.emplace(name).second) {
      bad_file(file_ + ": the header has the key " + message_quoted(name) +
               " twice; each tensor must be listed once");
    }
    if (name == kMetadataKey) {
      at_ = At::metadata;
      return;
    }
    tensor_ = {};
    tensor_.info.name = name;
    has_dtype_ = has_shape_ = false;
    offsets_.clear();
    if (has_control_character(name)) {
      bad_file(subject() + "its name holds a control character; names must be printable text");
    }
    at_ = At::tensor;
  }

  void tensor_key(std::string_view name) {
    bool repeated = false;
    if (name == "dtype") {
      repeated = std::exchange(has_dtype_, true);
      at_ = At::dtype;
    } else if (name == "shape") {
      repeated = std::exchange(has_shape_, true);
      at_ = At::shape;
    } else if (name == "data_offsets") {
      repeated = !offsets_.empty();
      at_ = At::offsets;
    } else {
      bad_file(subject() + "unknown key " + message_quoted(name) +
               "; the keys are dtype, shape and data_offsets");
    }
    if (repeated) {
      bad_file(subject() + "it has the key " + message_quoted(name) + " twice; keys must differ");
    }
  }

  void add_extent(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<Index>::max())) {
      refuse(std::to_string(value));
    }
    if (tensor_.info.shape.size() == kMaxRank) {
      bad_file(subject() + "shape has more than " + std::to_string(kMaxRank) +
               " dimensions, the most that a tensor can have");
    }
    tensor_.info.shape.push_back(static_cast<Index>(value));
  }

  void add_offset(std::uint64_t value) {
    if (value > kMaxSafetensorsOffset) {
      refuse(std::to_string(value));
    }
    if (offsets_.size() == 2) {
      bad_file(subject() +
               "data_offsets has more than two numbers; it must have two, begin and end");
    }
    offsets_.push_back(value);
  }

  void finish_tensor() {
    const char* const missing = !has_dtype_        ? "dtype"
                                : !has_shape_      ? "shape"
                                : offsets_.empty() ? "data_offsets"
                                                   : nullptr;
    if (missing != nullptr) {
      bad_file(subject() + "it has no " + missing + "; dtype, shape and data_offsets are required");
    }
    tensor_.begin = offsets_[0];
    tensor_.end = offsets_[1];
    if (tensor_.end < tensor_.begin) {
      bad_file(subject() + "data_offsets end at " + std::to_string(tensor_.end) +
               ", before their begin at " + std::to_string(tensor_.begin));
    }
    std::uint64_t bytes = 0;
    try {
      bytes = stored_bytes(tensor_.info);
    } catch (const Error& error) {
      bad_file(file_ + ": " + error.what());
    }
    if (tensor_.end - tensor_.begin != bytes) {
      bad_file(subject() + "data_offsets " + range_text(tensor_.begin, tensor_.end) + " hold " +
               std::to_string(tensor_.end - tensor_.begin) + " bytes, but " +
               std::string(to_string(tensor_.info.dtype)) + " " + to_string(tensor_.info.shape) +
               " takes " + std::to_string(bytes));
    }
    header.tensors.push_back(std::move(tensor_));
  }

  std::string file_;
  At at_ = At::document;
  std::unordered_set<std::string> names_;
  std::string metadata_key_;
  SafetensorsHeader::Tensor tensor_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  std::vector<std::uint64_t> offsets_;
};

/// @p tensor does not begin at @p position, where @p previous ends.
[[noreturn]] void refuse_begin(const SafetensorsHeader::Tensor& tensor, std::uint64_t position,
                               const SafetensorsHeader::Tensor* previous, const std::string& file) {
  const std::string name = message_quoted(tensor.info.name);
  if (previous == nullptr) {
    bad_file(file + ": tensor " + name + ": the first tensor begins at byte " +
             std::to_string(tensor.begin) + " of the data; it must begin at 0");
  }
  if (tensor.begin > position) {
    bad_file(file + ": tensor " + name + ": bytes " + range_text(position, tensor.begin) +
             " before it belong to no tensor; it must begin at " + std::to_string(position));
  }
  bad_file(file + ": tensors " + message_quoted(previous->info.name) + " " +
           range_text(previous->begin, previous->end) + " and " + name + " " +
           range_text(tensor.begin, tensor.end) +
           " overlap; each tensor must have bytes of its own");
}

/// Requires that @p tensors, sorted, cover [0, data_bytes) without gap or overlap.
void check_offsets(const std::vector<SafetensorsHeader::Tensor>& tensors, std::uint64_t data_bytes,
                   const std::string& file) {
  std::uint64_t position = 0;
  const SafetensorsHeader::Tensor* previous = nullptr;
  for (const SafetensorsHeader::Tensor& tensor : tensors) {
    if (tensor.begin != position) {
      refuse_begin(tensor, position, previous, file);
    }
    position = tensor.end;
    previous = &tensor;
  }
  if (position > data_bytes) {
    bad_file(file + ": the file is truncated: its tensors take " + std::to_string(position) +
             " bytes, but only " + std::to_string(data_bytes) + " follow the header");
  }
  if (position < data_bytes) {
    bad_file(file + ": the file has " + std::to_string(data_bytes - position) +
             " bytes too many: it must end with its last tensor" +
             (previous == nullptr ? "" : ", " + message_quoted(previous->info.name)));
  }
}

/// What an index says. Keys other than weight_map and metadata.total_size are left alone.
struct CheckpointIndex {
  std::map<std::string, std::string> file_of_tensor;
  std::optional<std::uint64_t> total_bytes;
};

std::uint64_t read_total_bytes(const JsonReader& reader) {
  // Some writers give 13476839424.0; a double holds every whole number up to 2^53.
  const double value = reader.number();
  if (!(value >= 0 && value <= 0x1p53 && value == std::floor(value))) {
    reader.fail("must be a whole number of bytes");
  }
  return static_cast<std::uint64_t>(value);
}

CheckpointIndex read_index(const fs::path& path) {
  const boost::json::value document = parse_json(read_text_file(path), path.string());
  const JsonReader reader(document, path.string());
  CheckpointIndex index;
  for (const auto& [tensor, file] : reader.at("weight_map").members()) {
    const std::string_view name = file.string();
    if (tensor == kMetadataKey) {
      file.fail("must not be listed; no tensor can have this name");
    }
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of("/\\") != std::string_view::npos || has_control_character(name)) {
      file.fail("is " + message_quoted(name) +
                "; it must be a plain file name, of a file beside the index");
    }
    index.file_of_tensor.emplace(tensor, name);
  }
  if (const auto metadata = reader.find("metadata")) {
    if (const auto total = metadata->find("total_size")) {
      index.total_bytes = read_total_bytes(*total);
    }
  }
  return index;
}

/// The file or index that a folder stands for.
fs::path resolve_folder(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name == "model.safetensors" || name.ends_with(".safetensors.index.json")) {
      found.push_back(name);
    }
  }
  if (error) {
    throw Error(Errc::io, "cannot list the folder '" + folder.string() + "': " + error.message());
  }
  if (found.empty()) {
    bad_file("the folder '" + folder.string() +
             "' holds neither model.safetensors nor a *.safetensors.index.json");
  }
  if (found.size() > 1) {
    std::sort(found.begin(), found.end());
    bad_file("the folder '" + folder.string() + "' leaves a choice between " +
             message_quoted(found[0]) + " and " + message_quoted(found[1]) +
             "; name the file to read");
  }
  return folder / found.front();
}

}  // namespace

std::uint64_t stored_bytes(const TensorInfo& info) {
  const auto subject = [&] { return "tensor " + message_quoted(info.name) + ": "; };
  const auto type = [&] {
    return std::string(to_string(info.dtype)) + " " + to_string(info.shape);
  };
  std::uint64_t bits = bits_of(info.dtype);
  bool empty = false;
  for (const Index extent : info.shape) {
    if (extent < 0) {
      bad_file(subject() + "shape " + to_string(info.shape) + " has a negative extent");
    }
    empty = empty || extent == 0;
    // An empty tensor counts too, without its zeros: its strides must fit.
    if (extent != 0 && __builtin_mul_overflow(bits, static_cast<std::uint64_t>(extent), &bits)) {
      bad_file(subject() + "the size of " + type() + " overflows; its bits must fit into 64 bits");
    }
  }
  const bool even = !info.shape.empty() && *(info.shape.end() - 1) % 2 == 0;
  if (info.dtype == DType::f4 && !even) {
    bad_file(subject() + type() + " has an odd last dimension; two f4 elements share a byte, " +
             "so it must be even");
  }
  if (empty) {
    return 0;
  }
  if (bits % 8 != 0) {
    bad_file(subject() + type() + " takes " + std::to_string(bits) +
             " bits; it must take whole bytes");
  }
  return bits / 8;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& file) {
  const std::string subject = message_quoted(file);
  HeaderEvents events(subject);
  read_json(text, subject + ": the header", events);
  SafetensorsHeader header = std::move(events.header);
  using Tensor = SafetensorsHeader::Tensor;
  std::sort(header.tensors.begin(), header.tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::tie(a.begin, a.end, a.info.name) < std::tie(b.begin, b.end, b.info.name);
  });
  check_offsets(header.tensors, data_bytes, subject);
  return header;
}

SafetensorsFile::SafetensorsFile(const fs::path& path) : path_(path), mapping_(path) {
  const std::span<const std::byte> bytes = mapping_.bytes();
  const std::string subject = message_quoted(path.string()) + ": ";
  if (bytes.size() < kLengthBytes) {
    bad_file(subject + "the file has " + std::to_string(bytes.size()) +
             " bytes; a safetensors file begins with an 8-byte header length");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  if (length > kMaxSafetensorsHeaderBytes) {
    bad_file(subject + "the header length is " + std::to_string(length) + "; it must be at most " +
             std::to_string(kMaxSafetensorsHeaderBytes) + ", so this may be no safetensors file");
  }
  const std::uint64_t rest = bytes.size() - kLengthBytes;
  if (length > rest) {
    bad_file(subject + "the header length is " + std::to_string(length) + ", but only " +
             std::to_string(rest) + " bytes follow: the file is truncated within its header");
  }
  const std::span<const std::byte> text = bytes.subspan(kLengthBytes, length);
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + length);
  SafetensorsHeader header = parse_safetensors_header(
      {reinterpret_cast<const char*>(text.data()), text.size()}, data.size(), path.string());
  metadata_ = std::move(header.metadata);
  tensors_.reserve(header.tensors.size());
  for (SafetensorsHeader::Tensor& tensor : header.tensors) {
    tensors_.push_back(
        {std::move(tensor.info), data.data() + tensor.begin, tensor.end - tensor.begin});
  }
}

Checkpoint::Checkpoint(const fs::path& path) : path_(path) {
  std::error_code ignored;  // a path that cannot be looked at fails when it is opened
  if (fs::is_directory(path, ignored)) {
    path_ = resolve_folder(path);
  }
  if (path_.extension() == ".json") {
    open_index();
  } else {
    files_.emplace_back(path_);
  }
  for (const SafetensorsFile& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) {
      catalogue_.push_back(tensor.info);
      by_name_.emplace(tensor.info.name, &tensor);
    }
  }
}

void Checkpoint::open_index() {
  const std::string subject = message_quoted(path_.string());
  const CheckpointIndex index = read_index(path_);
  std::map<std::string_view, std::string_view> tensor_of_file;  // its first, for messages
  for (const auto& [tensor, file] : index.file_of_tensor) {
    tensor_of_file.emplace(file, tensor);
  }
  std::uint64_t total_bytes = 0;
  std::unordered_set<std::string_view> found;
  for (const auto& [file, first] : tensor_of_file) {
    const fs::path shard = path_.parent_path() / file;
    std::error_code ignored;
    if (!fs::exists(shard, ignored)) {
      throw Error(Errc::io, subject + ": the file " + message_quoted(file) + " of tensor " +
                                message_quoted(first) +
                                " is missing; it must lie beside the index");
    }
    files_.emplace_back(shard);
    for (const StoredTensor& tensor : files_.back().tensors()) {
      const std::string& name = tensor.info.name;
      const auto listed = index.file_of_tensor.find(name);
      if (listed == index.file_of_tensor.end()) {
        bad_file(subject + ": tensor " + message_quoted(name) + " of the file " +
                 message_quoted(file) + " is not listed; the index must list every tensor");
      }
      if (listed->second != file) {
        bad_file(subject + ": tensor " + message_quoted(name) + " lies in the file " +
                 message_quoted(file) + ", but the index puts it into " +
                 message_quoted(listed->second) + "; each tensor must lie in one file");
      }
      found.insert(name);
      total_bytes += tensor.bytes;  // at most 2^48 a file that exists
    }
  }
  for (const auto& [tensor, file] : index.file_of_tensor) {
    if (!found.contains(tensor)) {
      bad_file(subject + ": the file " + message_quoted(file) + " has no tensor " +
               message_quoted(tensor) + ", which the index puts there");
    }
  }
  if (index.total_bytes && *index.total_bytes != total_bytes) {
    bad_file(subject + ": total_size is " + std::to_string(*index.total_bytes) +
             ", but the tensors take " + std::to_string(total_bytes) + " bytes");
  }
}

const StoredTensor& Checkpoint::tensor(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    bad_file(message_quoted(path_.string()) + ": no tensor " + message_quoted(name) +
             "; the checkpoint has " + std::to_string(catalogue_.size()) + " others");
  }
  return *found->second;
}

}  // namespace m2n
