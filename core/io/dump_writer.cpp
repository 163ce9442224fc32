// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"

namespace m2n {

DumpWriter::DumpWriter(const std::filesystem::path& file, const DumpOptions& options) {
  expects(options.deflate_level >= 0 && options.deflate_level <= 9, "deflate_level in 0..9");
  const h5::Lock lock;
  AtomicFile target(file);
  h5::File opened = h5::create_file(target.path());
  opened.path = target.target();  // what messages should name
  impl_ = std::make_unique<Impl>(std::move(target), options, std::move(opened));

  const h5::Owner root{impl_->file.object, "'" + file.string() + "'"};
  h5::write_fixed_attribute(root, "format", "m2n dump");
  h5::write_attribute(root, "schema_version", DType::u32, {}, &kDumpSchemaVersion);
  write_text(impl_->file, "/experiment/hdf5_version", h5::library_version());
  if (!options.run_id.empty()) {
    write_text(impl_->file, "/experiment/run_id", options.run_id);
  }
}

DumpWriter::~DumpWriter() {
  const h5::Lock lock;
  impl_.reset();  // closes the file, then removes it unless it was committed
}

void DumpWriter::experiment(const std::map<std::string, std::string>& facts) {
  const h5::Lock lock;
  impl_->expect_open();
  for (const auto& [key, text] : facts) {
    const std::string path = "/experiment/" + dump_path_of(key);
    if (h5::exists(impl_->file, path)) {
      throw Error(Errc::bad_argument, "'" + path + "' was written before; a fact is written once");
    }
    write_text(impl_->file, path, text);
  }
}

void DumpWriter::Impl::write_pieces(const std::string& path, const CompactShard& shard,
                                    std::uint64_t item_bytes) {
  const std::size_t rank = shard.pieces.front().box.rank();
  Column pieces(file, path, h5::piece_type(rank), shard.pieces.size(), 0, options.deflate_level);
  std::vector<Index> row;
  for (const Piece& piece : shard.pieces) {
    row.assign(piece.box.lo.begin(), piece.box.lo.end());
    row.insert(row.end(), piece.box.hi.begin(), piece.box.hi.end());
    row.push_back(static_cast<Index>(piece.view.offset_bytes / item_bytes));
    row.insert(row.end(), piece.view.strides.begin(), piece.view.strides.end());
    pieces.append(row.data());
  }
  pieces.finish();
}

std::string shard_tail(Role side, Rank rank, const std::string& name) {
  return std::string(to_string(side)) + "/" + std::to_string(rank) + "/" + dump_path_of(name);
}

bool is_one_box(const CompactShard& shard) {
  return shard.pieces.size() == 1 && shard.pieces.front().box.extents() == shard.local_shape;
}

void DumpWriter::Impl::remember(Role side, const Parameter& parameter, StoredShard shard) {
  const DType dtype =
      side == Role::source ? parameter.source_dtype() : parameter.destination_dtype();
  auto& side_stored = stored[side];
  const auto [entry, is_new] = stored_index[side].try_emplace(parameter.name, side_stored.size());
  if (is_new) {
    side_stored.push_back({parameter.name, {dtype, parameter.shape, {}}});
  }
  side_stored[entry->second].second.shards.push_back(std::move(shard));
}

void DumpWriter::shard(Role side, Rank rank, const Parameter& parameter, const CompactShard& shard,
                       const std::byte* compact) {
  expects(side != Role::scratch, "a side: source or destination");
  const DType dtype =
      side == Role::source ? parameter.source_dtype() : parameter.destination_dtype();
  const std::uint64_t item_bytes = bytes_of(dtype);
  const Index elements = element_count(shard.local_shape);
  expects(elements == 0 || compact != nullptr, "the shard's elements");
  const std::string tail = shard_tail(side, rank, parameter.name);

  h5::Checksum checksum;  // before the lock: it reads every byte
  checksum.add(compact, static_cast<std::uint64_t>(elements) * item_bytes);

  const h5::Lock lock;
  impl_->expect_open();
  const h5::Dataset dataset =
      h5::create_dataset(impl_->file, "/shards/" + tail, h5::type_of(dtype), shard.local_shape,
                         impl_->chunk_bytes(), impl_->options.deflate_level);
  if (elements > 0) {
    h5::write_box(dataset, Box::whole(shard.local_shape), compact);
  }
  const h5::Owner owner = h5::owner_of(dataset);
  add_checksum(dataset, checksum);
  h5::write_attribute(owner, "name", parameter.name);
  write_dtype(owner, dtype);
  const auto dims = static_cast<Index>(parameter.shape.size());
  h5::write_attribute(owner, "global_shape", DType::i64, Shape{dims}, parameter.shape.begin());
  if (is_one_box(shard)) {
    const Box& box = shard.pieces.front().box;
    std::vector<Index> ends;
    for (std::size_t d = 0; d < box.rank(); ++d) {
      ends.push_back(box.lo[d]);
      ends.push_back(box.hi[d]);
    }
    h5::write_attribute(owner, "box", DType::i64, Shape{dims, 2}, ends.data());
  } else if (!shard.pieces.empty()) {
    impl_->write_pieces("/pieces/" + tail, shard, item_bytes);
  }
  impl_->remember(side, parameter, {"", "/shards/" + tail, shard});
}

void DumpWriter::shard_in_part(const std::string& part, Role side, Rank rank,
                               const Parameter& parameter, const CompactShard& shard) {
  expects(side != Role::scratch, "a side: source or destination");
  expects(!impl_->options.run_id.empty(), "DumpOptions::run_id, by which parts are told apart");
  expects(!part.empty() && part.find('/') == part.npos, "the plain name of a file in this folder");
  const h5::Lock lock;
  impl_->expect_open();
  if (std::find(impl_->parts.begin(), impl_->parts.end(), part) == impl_->parts.end()) {
    impl_->parts.push_back(part);
  }
  const std::string group = std::string(to_string(side)) + "/" + std::to_string(rank);
  const auto link_once = [&](const std::string& path) {
    if (impl_->links.insert(path).second) {
      h5::link_external(impl_->file, part, path, path);
    }
  };
  link_once("/shards/" + group);
  if (!is_one_box(shard) && !shard.pieces.empty()) {
    link_once("/pieces/" + group);
  }
  impl_->remember(side, parameter,
                  {part, "/shards/" + shard_tail(side, rank, parameter.name), shard});
}

void DumpWriter::commit() {
  const h5::Lock lock;
  impl_->expect_open();
  impl_->write_rounds();
  impl_->write_phases();
  impl_->write_digests();
  impl_->write_parts();
  const std::filesystem::path& target = impl_->target.target();
  const std::vector<std::string> old_parts = dump_parts(target);
  constexpr std::uint8_t kYes = 1;
  h5::write_attribute({impl_->file.object, "'" + impl_->file.path.string() + "'"}, "complete",
                      DType::u8, {}, &kYes);
  h5::close(std::move(impl_->file));
  impl_->target.commit();
  impl_->committed = true;
  // Only now does nobody need what the old dump referred to.
  for (const std::string& part : old_parts) {
    if (std::find(impl_->parts.begin(), impl_->parts.end(), part) == impl_->parts.end()) {
      std::error_code ignored;
      std::filesystem::remove(target.parent_path() / part, ignored);
    }
  }
}

}  // namespace m2n
