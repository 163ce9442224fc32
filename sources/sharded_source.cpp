// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/sharded_source.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/api/memory.hpp"
#include "core/error.hpp"

namespace m2n::sources {

namespace {

constexpr std::byte kPaddingByte{0x2a};

/// A part at a time, so that little host memory is needed for much of a device's.
void fill_with_padding(const LocalBuffer& buffer) {
  constexpr std::uint64_t kPart = 1 << 20;
  const std::vector<std::byte> padding(std::min(kPart, buffer.bytes), kPaddingByte);
  for (std::uint64_t at = 0; at < buffer.bytes; at += kPart) {
    memory_of(buffer).write(buffer.from(at), {padding.data(), std::min(kPart, buffer.bytes - at)});
  }
}

/// False only when the strides alone show that no two elements of the box share an address.
bool may_repeat(const Shape& extents, const Strides& strides) {
  std::vector<std::pair<Index, Index>> dims;  // stride, extent
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] > 1) {
      dims.emplace_back(strides[d] < 0 ? -strides[d] : strides[d], extents[d]);
    }
  }
  std::sort(dims.begin(), dims.end());
  Index reach = 0;
  for (const auto& [stride, extent] : dims) {
    if (stride <= reach) {
      return true;
    }
    reach = checked_add(reach, checked_mul(stride, extent - 1));
  }
  return false;
}

}  // namespace

std::shared_ptr<const Layout> Layouts::get(const std::string& key,
                                           const std::function<Layout()>& make) {
  auto& layout = by_key_[key];
  if (!layout) {
    layout = table_.intern(make());
  }
  return layout;
}

std::string geometry_key(const TensorInfo& tensor) {
  return std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape);
}

void naming(std::string_view name, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    throw Error(error.code(), "parameter '" + std::string(name) + "': " + error.what(),
                error.where());
  }
}

void refuse_tensor(const TensorInfo& tensor, const std::string& what) {
  throw Error(Errc::bad_argument,
              "parameter '" + tensor.name + "' " + to_string(tensor.shape) + ": " + what);
}

void require_matches(const OptionReader& options, std::string_view key,
                     const std::vector<std::string>& patterns, const Catalogue& tensors) {
  for (const auto& pattern : patterns) {
    if (std::none_of(tensors.begin(), tensors.end(), [&](const TensorInfo& tensor) {
          return glob_matches(pattern, tensor.name);
        })) {
      options.refuse("pattern '" + pattern + "' of option '" + std::string(key) +
                     "' matches none of the " + std::to_string(tensors.size()) + " parameters");
    }
  }
}

Catalogue held_tensors(const SourceContext& context, const OptionReader& options) {
  expects(context.values != nullptr, "a source with values");
  const Catalogue& all = context.values->catalogue();
  const auto skipped = options.patterns("skip");
  require_matches(options, "skip", skipped, all);
  Catalogue held;
  for (const auto& tensor : all) {
    if (std::none_of(skipped.begin(), skipped.end(), [&](const std::string& pattern) {
          return glob_matches(pattern, tensor.name);
        })) {
      if (!is_byte_sized(tensor.dtype)) {
        refuse_tensor(tensor, "elements of " + std::string(to_string(tensor.dtype)) +
                                  " are smaller than a byte and cannot be sharded");
      }
      held.push_back(tensor);
    }
  }
  return held;
}

ShardedSource::ShardedSource(std::string name, const SourceContext& context, Sharding sharding)
    : name_(std::move(name)),
      rank_(context.rank),
      place_(context.place),
      values_(context.values),
      sharding_(std::move(sharding)) {
  expects(values_ != nullptr, "a source with values");
  expects(context.rank >= 0, "a source's rank of at least 0");
  std::unordered_map<std::string_view, const TensorInfo*> catalogue;
  for (const auto& tensor : values_->catalogue()) {
    catalogue.emplace(tensor.name, &tensor);
  }
  std::unordered_set<std::string_view> seen;
  for (const auto& param : sharding_.params) {
    if (!seen.insert(param.name).second) {
      throw Error(Errc::bad_argument,
                  "parameter '" + param.name + "' is offered twice; names must be unique");
    }
    const auto found = catalogue.find(param.name);
    if (found == catalogue.end()) {
      throw Error(Errc::bad_argument, "parameter '" + param.name + "' has no values: '" +
                                          std::string(values_->name()) +
                                          "' does not hold a tensor of that name");
    }
    const TensorInfo declared{param.name, param.dtype, param.shape};
    if (*found->second != declared) {
      throw Error(Errc::bad_argument, "parameter '" + param.name + "' is declared as " +
                                          geometry_key(declared) + ", but its values are " +
                                          geometry_key(*found->second));
    }
  }
  size_buffers();
}

void ShardedSource::size_buffers() {
  struct Span {
    ByteSpan bytes;
    Buffer* buffer = nullptr;
  };
  std::vector<Span> spans;
  for (const auto& [buffer, bytes] : sharding_.storage_bytes) {
    buffers_[buffer].bytes = bytes;
  }
  for (const auto& param : sharding_.params) {
    naming(param.name, [&] {
      const std::uint64_t item = bytes_of(param.dtype);
      for (const auto& [rank, piece] : param.side.layout->pieces_of(rank_)) {
        Buffer& buffer = buffers_[param.side.buffers.at(piece.view.buffer)];
        const Shape extents = piece.box.extents();
        const ByteSpan span = byte_span(extents, piece.view, item);
        buffer.bytes = std::max(buffer.bytes, span.end);
        buffer.used_bytes = checked_add_bytes(
            buffer.used_bytes,
            checked_mul_bytes(static_cast<std::uint64_t>(piece.box.volume()), item));
        buffer.shared = buffer.shared || may_repeat(extents, piece.view.strides);
        spans.push_back({span, &buffer});
      }
    });
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::pair(a.buffer, a.bytes.begin) < std::pair(b.buffer, b.bytes.begin);
  });
  std::uint64_t reach = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (i > 0 && spans[i].buffer == spans[i - 1].buffer) {
      spans[i].buffer->shared = spans[i].buffer->shared || spans[i].bytes.begin < reach;
      reach = std::max(reach, spans[i].bytes.end);
    } else {
      reach = spans[i].bytes.end;
    }
  }
}

/// One arena for all buffers, in the order in which the parameters name them; padding comes last.
void ShardedSource::allocate() {
  arena_.reset();
  std::vector<Buffer*> order;
  std::unordered_set<const Buffer*> seen;
  const auto take = [&](Buffer& buffer) {
    if (buffer.bytes > 0 && seen.insert(&buffer).second) {
      order.push_back(&buffer);
    }
  };
  for (const auto& param : sharding_.params) {
    for (const auto& name : param.side.buffers) {
      if (const auto found = buffers_.find(name); found != buffers_.end()) {
        take(found->second);
      }
    }
  }
  for (auto& [name, buffer] : buffers_) {
    take(buffer);
  }
  const std::uint64_t align = weight_alignment(place_.space);
  std::uint64_t bytes = 0;
  for (const Buffer* buffer : order) {
    bytes = checked_add_bytes(bytes, checked_add_bytes(buffer->bytes, align - 1));
  }
  try {
    arena_ = memory_of(place_.space).reserve(bytes, place_.device);
  } catch (const Error& error) {
    throw Error(error.code(), "rank " + std::to_string(rank_) + " has no memory for the " +
                                  std::to_string(bytes) + " bytes of its weights: " + error.what());
  }
  for (Buffer* buffer : order) {
    buffer->data = arena_->take(buffer->bytes, align);
    if (buffer->used_bytes < buffer->bytes || buffer->shared) {
      fill_with_padding(buffer->data);
    }
  }
}

void ShardedSource::fill() {
  allocate();
  for (const auto& param : sharding_.params) {
    for (const auto& [rank, piece] : param.side.layout->pieces_of(rank_)) {
      const Buffer& buffer = buffers_.find(param.side.buffers[piece.view.buffer])->second;
      write_values(*values_, {param.name, param.dtype, param.shape}, piece.box,
                   buffer.data.from(piece.view.offset_bytes), piece.view.strides);
    }
  }
  for (const auto& param : sharding_.params) {
    for (const auto& [rank, piece] : param.side.layout->pieces_of(rank_)) {
      if (buffers_.find(param.side.buffers[piece.view.buffer])->second.shared) {
        check_shared(param, piece);
      }
    }
  }
}

/// Whether @p piece still holds its own values after everything was written.
void ShardedSource::check_shared(const ParamSpec& param, const Piece& piece) const {
  const std::string& name = param.side.buffers[piece.view.buffer];
  const Shape extents = piece.box.extents();
  const Strides compact = row_major(extents);
  const auto bytes = static_cast<std::size_t>(piece.box.volume()) *
                     static_cast<std::size_t>(bytes_of(param.dtype));
  std::vector<std::byte> wanted(bytes);
  std::vector<std::byte> held(bytes);
  values_->read(param.name, piece.box, wanted.data(), compact);
  copy_region({.extents = extents,
               .source_strides = piece.view.strides,
               .destination_strides = compact,
               .source_dtype = param.dtype,
               .destination_dtype = param.dtype},
              buffers_.find(name)->second.data.from(piece.view.offset_bytes),
              host_buffer(held.data(), held.size()));
  if (wanted != held) {
    throw Error(Errc::bad_argument, "parameter '" + param.name + "' on rank " +
                                        std::to_string(rank_) + ": box " + to_string(piece.box) +
                                        " shares bytes of buffer '" + name +
                                        "' with elements of other values; views must not overlap");
  }
}

std::vector<ParamLoan> ShardedSource::borrow(std::uint64_t version) {
  if (version_ && version < *version_) {
    throw Error(Errc::bad_argument, "source '" + name_ + "' on rank " + std::to_string(rank_) +
                                        " was asked for version " + std::to_string(version) +
                                        " after version " + std::to_string(*version_) +
                                        "; versions only grow");
  }
  if (!version_) {
    loans_.clear();
    fill();  // once more after a failure
  }
  if (loans_.empty()) {
    lend();
  }
  version_ = version;
  return loans_;
}

void ShardedSource::lend() {
  loans_.reserve(sharding_.params.size());
  for (const auto& param : sharding_.params) {
    ParamLoan loan{param.name, param.dtype, param.shape, {}};
    for (const auto& name : param.side.buffers) {
      const auto found = buffers_.find(name);
      if (found == buffers_.end() || found->second.bytes == 0) {
        loan.slots.emplace_back();
      } else {
        loan.slots.push_back(found->second.data);
      }
    }
    loans_.push_back(std::move(loan));
  }
}

}  // namespace m2n::sources
