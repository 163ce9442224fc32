// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"
#include "core/io/dump_reader_impl.hpp"
#include "core/tensor/copy.hpp"

namespace m2n {
namespace {

/// What a read of part of a shard keeps in memory at a time.
constexpr std::uint64_t kReadBlock = std::uint64_t{64} << 20;

/// Calls @p visit for every dataset and link below @p group.
template <class Visit>
void walk(const h5::File& file, const std::string& group, Visit&& visit) {
  for (const h5::Member& member : h5::members(file, group.empty() ? "/" : group)) {
    const std::string path = group + "/" + member.name;
    if (member.kind == h5::Kind::group) {
      walk(file, path, visit);
    } else {
      visit(path, member.kind);
    }
  }
}

std::vector<std::byte> read_whole(const h5::Dataset& dataset) {
  std::vector<std::byte> out(dataset.bytes());
  h5::read_box(dataset, Box::whole(dataset.shape), out.data());
  return out;
}

std::string hex(std::uint64_t word) {
  std::string out;
  for (int shift = 60; shift >= 0; shift -= 4) {
    out += "0123456789abcdef"[(word >> shift) & 15];
  }
  return out;
}

}  // namespace

std::string damage(const h5::Dataset& dataset) {
  const auto expected = h5::word_attribute(h5::owner_of(dataset), "checksum");
  if (!expected) {
    return dataset.label + " has no checksum";
  }
  const std::uint64_t found = h5::checksum_of(dataset);
  return found == *expected ? ""
                            : dataset.label + " is damaged: its bytes have the checksum " +
                                  hex(found) + " instead of " + hex(*expected);
}

namespace {

/// What an element is: m2n's number, or else the word that other programs write, or else nothing.
std::optional<DType> declared_dtype(const h5::Dataset& dataset) {
  const h5::Owner owner = h5::owner_of(dataset);
  if (const auto number = h5::word_attribute(owner, "dtype_number")) {
    if (*number >= all_dtypes().size()) {
      throw Error(Errc::io, dataset.label + " has the dtype number " + std::to_string(*number) +
                                "; there are " + std::to_string(all_dtypes().size()));
    }
    return all_dtypes()[*number];
  }
  if (const auto word = h5::text_attribute(owner, "dtype")) {
    try {
      return dtype_from_string(*word);
    } catch (const Error& error) {
      throw Error(Errc::io, dataset.label + ": " + error.what());
    }
  }
  return std::nullopt;
}

/// The pieces of a shard that is not one box.
std::vector<Piece> read_pieces(const h5::File& file, const std::string& path, std::size_t rank,
                               std::uint64_t item_bytes) {
  const h5::Dataset dataset = h5::open_dataset(file, path);
  if (rank == 0 || dataset.shape.size() != 1 || !h5::stored_as(dataset, h5::piece_type(rank))) {
    throw Error(Errc::io, dataset.label + " does not hold pieces of rank " + std::to_string(rank));
  }
  const std::string wrong = damage(dataset);
  if (!wrong.empty()) {
    throw Error(Errc::io, wrong);
  }
  std::vector<Index> words(static_cast<std::size_t>(dataset.shape[0]) * (3 * rank + 1));
  h5::read_box(dataset, Box::whole(dataset.shape), reinterpret_cast<std::byte*>(words.data()));
  std::vector<Piece> pieces;
  for (auto at = words.begin(); at != words.end();) {
    const auto dims = [&] {
      const Dims out(std::span<const Index>(&*at, rank));
      at += static_cast<std::ptrdiff_t>(rank);
      return out;
    };
    Piece piece;
    piece.box.lo = dims();
    piece.box.hi = dims();
    piece.view.offset_bytes =
        checked_mul_bytes(static_cast<std::uint64_t>(*at++), item_bytes, "offset of a piece");
    piece.view.strides = dims();
    pieces.push_back(piece);
  }
  return pieces;
}

/// @throws Error{io} unless the pieces lie in the tensor and make up the shard.
void check_pieces(const DumpShard& shard, const std::string& label) {
  Index held = 0;
  for (const Piece& piece : shard.compact.pieces) {
    bool inside = piece.box.rank() == shard.shape.size();
    for (std::size_t d = 0; d < piece.box.rank() && inside; ++d) {
      inside = 0 <= piece.box.lo[d] && piece.box.lo[d] <= piece.box.hi[d] &&
               piece.box.hi[d] <= shard.shape[d];
    }
    if (!inside) {
      throw Error(Errc::io, label + " says that it holds " + to_string(piece.box) +
                                ", which is not inside the shape " + to_string(shard.shape));
    }
    held = checked_add(held, piece.box.volume());
  }
  if (held != element_count(shard.compact.local_shape)) {
    throw Error(Errc::io, label + " has " +
                              std::to_string(element_count(shard.compact.local_shape)) +
                              " elements, but its boxes have " + std::to_string(held));
  }
}

DumpShard read_header(const h5::File& file, Role side, Rank rank, const std::string& member) {
  const std::string tail = std::string(to_string(side)) + "/" + std::to_string(rank) + "/" + member;
  DumpShard shard;
  shard.side = side;
  shard.rank = rank;
  shard.path = "/shards/" + tail;
  const h5::Dataset dataset = h5::open_dataset(file, shard.path);
  const h5::Owner owner = h5::owner_of(dataset);
  shard.name = name_of_dump_path(member);
  if (const auto declared = declared_dtype(dataset)) {
    if (!is_byte_sized(*declared)) {
      throw Error(Errc::io, dataset.label + " says that it holds " +
                                std::string(to_string(*declared)) +
                                ", which packs several elements into a byte");
    }
    shard.dtype = *declared;
  } else if (const auto stored = h5::stored_dtype(dataset)) {
    shard.dtype = *stored;
  } else {
    throw Error(Errc::io, dataset.label + " has no attribute 'dtype', and HDF5's type says none");
  }
  if (!h5::stored_as(dataset, h5::type_of(shard.dtype))) {
    throw Error(Errc::io, dataset.label + " is stored as " + h5::type_name(dataset) +
                              ", which is not how a dump holds " +
                              std::string(to_string(shard.dtype)));
  }
  shard.compact.local_shape = dataset.shape;
  const auto global_shape = h5::integer_attribute(owner, "global_shape");
  if (!global_shape) {
    throw Error(Errc::io, dataset.label + " has no attribute 'global_shape'");
  }
  shard.shape = Shape(std::span<const Index>(global_shape->values));
  element_count(shard.shape);  // refuses negative extents and overflow

  const std::string pieces_path = "/pieces/" + tail;
  if (const auto box = h5::integer_attribute(owner, "box")) {
    if (box->values.size() != 2 * shard.shape.size() ||
        dataset.shape.size() != shard.shape.size()) {
      throw Error(Errc::io, dataset.label + " has a box of another rank than its tensor");
    }
    Piece piece;
    for (std::size_t d = 0; d < shard.shape.size(); ++d) {
      piece.box.lo.push_back(box->values[2 * d]);
      piece.box.hi.push_back(box->values[2 * d + 1]);
    }
    if (piece.box.extents() != dataset.shape) {
      throw Error(Errc::io, dataset.label + " has the shape " + to_string(dataset.shape) +
                                ", but its box is " + to_string(piece.box));
    }
    piece.view.strides = row_major(dataset.shape);
    shard.compact.pieces.push_back(piece);
  } else if (h5::exists(file, pieces_path)) {
    shard.compact.pieces =
        read_pieces(file, pieces_path, shard.shape.size(), bytes_of(shard.dtype));
  }
  check_pieces(shard, dataset.label);
  return shard;
}

/// Reads @p part of a piece into contiguous memory.
/// @param offset   Of the part's first element in the compact tensor.
/// @param strides  Of the piece there.
void read_part(const h5::Dataset& dataset, const Shape& extents, Index offset,
               const Strides& strides, std::byte* out) {
  const std::size_t rank = extents.size();
  if (dataset.shape.size() == rank && strides == row_major(dataset.shape)) {
    Box local;
    Index rest = offset;
    for (std::size_t d = 0; d < rank; ++d) {
      local.lo.push_back(rest / strides[d]);
      local.hi.push_back(rest / strides[d] + extents[d]);
      rest %= strides[d];
    }
    h5::read_box(dataset, local, out);
    return;
  }
  // A tensor of rank 1: runs of neighbours, then runs at one distance, then a loop.
  Index run = 1;
  std::size_t outer = rank;
  while (outer > 0 && (extents[outer - 1] == 1 || strides[outer - 1] == run)) {
    run *= extents[--outer];
  }
  Index count = 1;
  Index stride = run;
  if (outer > 0) {
    --outer;
    count = extents[outer];
    stride = strides[outer];
  }
  const std::uint64_t bytes =
      static_cast<std::uint64_t>(count) * static_cast<std::uint64_t>(run) * dataset.type.bytes;
  Dims at = Dims::filled(outer, 0);
  for (;;) {
    Index start = offset;
    for (std::size_t d = 0; d < outer; ++d) {
      start += at[d] * strides[d];
    }
    h5::read_runs(dataset, start, stride, count, run, out);
    out += bytes;
    std::size_t d = outer;
    while (d > 0 && ++at[d - 1] == extents[d - 1]) {
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
  }
}

}  // namespace

DumpReader::DumpReader(const std::filesystem::path& file) {
  const h5::Lock lock;
  impl_ = std::make_unique<Impl>();
  impl_->path = file;
  impl_->file = h5::open_file(file);
  const std::string subject = "'" + file.string() + "'";
  const h5::Owner root{impl_->file.object, subject};
  const auto format = h5::text_attribute(root, "format");
  const auto version = h5::integer_attribute(root, "schema_version");
  if (format != "m2n dump" || !version || version->values.size() != 1) {
    throw Error(Errc::io, subject + " is an HDF5 file, but not a dump of m2n");
  }
  if (version->values.front() < 1 || version->values.front() > Index{kDumpSchemaVersion}) {
    throw Error(Errc::io, subject + " has schema version " +
                              std::to_string(version->values.front()) +
                              "; this program reads 1 to " + std::to_string(kDumpSchemaVersion));
  }
  impl_->schema_version = static_cast<std::uint32_t>(version->values.front());
  const auto complete = h5::integer_attribute(root, "complete");
  if (!complete || complete->values != std::vector<Index>{1}) {
    throw Error(Errc::io, subject + " was never completed: its writer stopped before the end");
  }
  if (h5::exists(impl_->file, "/parts/file")) {
    expect_parts(file, h5::read_texts(impl_->file, "/parts/file"), fact("run_id").value_or(""));
  }
}

DumpReader::DumpReader(DumpReader&&) noexcept = default;
DumpReader& DumpReader::operator=(DumpReader&&) noexcept = default;
DumpReader::~DumpReader() = default;

const std::filesystem::path& DumpReader::file() const noexcept { return impl_->path; }
std::uint32_t DumpReader::schema_version() const noexcept { return impl_->schema_version; }

std::optional<std::string> DumpReader::fact(std::string_view key) const {
  const h5::Lock lock;
  const std::string path = "/experiment/" + dump_path_of(key);
  if (!h5::exists(impl_->file, path)) {
    return std::nullopt;
  }
  const std::vector<std::string> texts = h5::read_texts(impl_->file, path);
  return texts.empty() ? std::string() : texts.front();
}

std::map<std::string, std::string> DumpReader::facts() const {
  const h5::Lock lock;
  std::map<std::string, std::string> out;
  for (const h5::Member& member : h5::members(impl_->file, "/experiment")) {
    if (member.kind == h5::Kind::dataset) {
      const std::string key = name_of_dump_path(member.name);
      out.emplace(key, fact(key).value_or(""));
    }
  }
  return out;
}

std::vector<std::string> DumpReader::parameters() const {
  const h5::Lock lock;
  std::vector<std::string> names;
  if (h5::exists(impl_->file, "/params/path")) {
    names = h5::read_texts(impl_->file, "/params/path");
    std::transform(names.begin(), names.end(), names.begin(), name_of_dump_path);
  }
  return names;
}

std::vector<DumpEntry> DumpReader::entries() const {
  const h5::Lock lock;
  std::vector<DumpEntry> out;
  walk(impl_->file, "", [&](const std::string& path, h5::Kind kind) {
    const h5::Dataset dataset = h5::open_dataset(impl_->file, path);
    DumpEntry entry{path, h5::type_name(dataset), dataset.shape, dataset.bytes(),
                    kind == h5::Kind::link || dataset.stitched};
    if (const auto dtype = declared_dtype(dataset)) {
      entry.type = to_string(*dtype);
    }
    out.push_back(std::move(entry));
  });
  std::sort(out.begin(), out.end(),
            [](const DumpEntry& a, const DumpEntry& b) { return a.path < b.path; });
  return out;
}

std::vector<DumpShard> DumpReader::shards(Role side) const {
  const h5::Lock lock;
  const std::string group = "/shards/" + std::string(to_string(side));
  std::vector<Rank> ranks;
  for (const h5::Member& member : h5::members(impl_->file, group)) {
    Rank rank = 0;
    const char* end = member.name.data() + member.name.size();
    const auto parsed = std::from_chars(member.name.data(), end, rank);
    if (parsed.ec != std::errc{} || parsed.ptr != end || rank < 0) {
      throw Error(Errc::io, "'" + impl_->path.string() + "' has '" + group + "/" + member.name +
                                "', which is no rank");
    }
    ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  std::vector<DumpShard> out;
  for (const Rank rank : ranks) {
    for (const h5::Member& member : h5::members(impl_->file, group + "/" + std::to_string(rank))) {
      out.push_back(read_header(impl_->file, side, rank, member.name));
    }
  }
  return out;
}

void DumpReader::read(const DumpShard& shard, std::byte* out) const {
  const h5::Lock lock;
  const h5::Dataset dataset = h5::open_dataset(impl_->file, shard.path);
  h5::read_box(dataset, Box::whole(dataset.shape), out);
}

void DumpReader::read(const DumpShard& shard, std::size_t piece, const Box& inner, std::byte* out,
                      const Strides& strides) const {
  expects(piece < shard.compact.pieces.size(), "a piece of the shard");
  const Piece& held = shard.compact.pieces[piece];
  expects(held.box.contains(inner), "a box inside the piece");
  if (inner.empty()) {
    return;
  }
  const h5::Lock lock;
  const h5::Dataset dataset = h5::open_dataset(impl_->file, shard.path);
  const std::uint64_t item_bytes = bytes_of(shard.dtype);
  const Shape extents = inner.extents();
  const auto first = static_cast<Index>(held.view.offset_bytes / item_bytes);
  const auto offset_of = [&](const Box& part, const Strides& by) {
    Index offset = 0;
    for (std::size_t d = 0; d < part.rank(); ++d) {
      offset += part.lo[d] * by[d];
    }
    return offset;
  };
  const Index inner_offset =
      first + offset_of(inner, held.view.strides) - offset_of(held.box, held.view.strides);
  if (strides == row_major(extents)) {
    read_part(dataset, extents, inner_offset, held.view.strides, out);
    return;
  }
  std::vector<std::byte> block;
  h5::for_each_block(extents, item_bytes, kReadBlock, [&](const Box& part) {
    const Shape size = part.extents();
    block.resize(static_cast<std::size_t>(part.volume()) * item_bytes);
    read_part(dataset, size, inner_offset + offset_of(part, held.view.strides), held.view.strides,
              block.data());
    const auto at = static_cast<std::ptrdiff_t>(item_bytes) * offset_of(part, strides);
    copy_region({size, row_major(size), strides, shard.dtype, shard.dtype}, block.data(), out + at);
  });
}

std::vector<std::byte> DumpReader::bytes(const std::string& path) const {
  const h5::Lock lock;
  return read_whole(h5::open_dataset(impl_->file, path));
}

bool DumpReader::has(const std::string& path) const {
  const h5::Lock lock;
  return h5::exists(impl_->file, path);
}

void DumpReader::expect_items(const std::string& path, std::size_t bytes,
                              std::size_t item_bytes) const {
  if (bytes % item_bytes != 0) {
    throw Error(Errc::io, "dataset '" + path + "' of '" + impl_->path.string() +
                              "' has elements of the wrong size");
  }
}

std::uint64_t DumpReader::verify(const std::string& path) const {
  const h5::Lock lock;
  const h5::Dataset dataset = h5::open_dataset(impl_->file, path);
  const std::string wrong = damage(dataset);
  if (!wrong.empty()) {
    throw Error(Errc::io, wrong);
  }
  return dataset.bytes();
}

std::uint64_t DumpReader::verify() const {
  const h5::Lock lock;
  std::uint64_t bytes = 0;
  std::vector<std::string> wrong;
  walk(impl_->file, "", [&](const std::string& path, h5::Kind kind) {
    if (kind != h5::Kind::dataset) {
      return;  // a link: what it leads to is visited by its own name
    }
    try {
      const h5::Dataset dataset = h5::open_dataset(impl_->file, path);
      if (!dataset.stitched) {
        const std::string text = damage(dataset);
        if (!text.empty()) {
          wrong.push_back(text);
        }
        bytes = checked_add_bytes(bytes, dataset.bytes());
      }
    } catch (const Error& error) {
      wrong.emplace_back(error.what());
    }
  });
  if (!wrong.empty()) {
    std::string text = wrong.front();
    for (std::size_t i = 1; i < wrong.size(); ++i) {
      text += "; " + wrong[i];
    }
    throw Error(Errc::io, text);
  }
  return bytes;
}

}  // namespace m2n
