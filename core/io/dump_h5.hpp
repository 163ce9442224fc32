// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The only place that talks to HDF5: handles, errors, and reads and writes that convert nothing.
/// Not installed.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n::h5 {

/// No call moves more (HDF5 on some file systems fails above 2 GiB).
inline constexpr std::uint64_t kLargestCallBytes = std::uint64_t{1} << 30;
/// No chunk is larger, whatever the dataset (HDF5 fails at 4 GiB, and its cache is small).
inline constexpr std::uint64_t kLargestChunkBytes = std::uint64_t{8} << 20;

/// One for the process, because HDF5 has global state. Held by every call of a dump from before its
/// first HDF5 object until its last one is closed, and by the destructors of the rest. Recursive.
/// Turns HDF5's own printing off for the thread, for good: at exit it would otherwise complain
/// about files that were damaged.
class Lock {
 public:
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> held_;
};

/// Owns one HDF5 object of any kind. Takes the lock to let go of it.
class Object {
 public:
  Object() = default;
  explicit Object(std::int64_t id) noexcept : id_(id) {}
  Object(Object&& other) noexcept;
  Object& operator=(Object&& other) noexcept;
  ~Object();

  std::int64_t id() const noexcept { return id_; }
  /// Hands the object over to the caller.
  std::int64_t release() noexcept { return std::exchange(id_, -1); }

 private:
  std::int64_t id_ = -1;
};

struct File {
  Object object;
  std::filesystem::path path;  ///< For messages.
};

/// How an element lies in the file, and in memory likewise.
struct Type {
  Object object;
  std::uint64_t bytes = 0;
};
Type type_of(DType dtype);
/// Strings of exactly @p bytes (at least 1), UTF-8, padded with NUL.
Type text_type(std::uint64_t bytes);
/// A row of /pieces: packed 64-bit integers lo[rank], hi[rank], offset, strides[rank].
Type piece_type(std::size_t rank);

/// An open dataset, with what is needed to read it and to say what it is.
struct Dataset {
  Object object;
  Type type;
  Shape shape;
  std::string label;  ///< "dataset '/plan/lo' of 'run.h5'"
  bool stitched = false;

  std::uint64_t bytes() const;
};

File create_file(const std::filesystem::path& path);
/// Read-only. @throws Error{io} saying whether it is missing, not HDF5, or truncated.
File open_file(const std::filesystem::path& path);
/// Flushes and closes, and says so when that fails.
void close(File file);

/// @param chunk_bytes    0: contiguous. Else the size that chunks come close to, at most
///                       kLargestChunkBytes; they are blocks() of that size.
/// @param deflate_level  0: none. Else zlib; needs chunks.
Dataset create_dataset(const File& file, const std::string& path, Type type, const Shape& shape,
                       std::uint64_t chunk_bytes = 0, int deflate_level = 0);
/// @throws Error{io} when there is none.
Dataset open_dataset(const File& file, const std::string& path);

/// Cuts a row-major array into blocks of at most @p limit bytes (at least one element), each one
/// contiguous, in order.
void for_each_block(const Shape& shape, std::uint64_t item_bytes, std::uint64_t limit,
                    const std::function<void(const Box&)>& block);

/// A box from or to contiguous memory, in calls of at most kLargestCallBytes.
void write_box(const Dataset& dataset, const Box& box, const std::byte* data);
void read_box(const Dataset& dataset, const Box& box, std::byte* data);
/// @p count runs of @p run elements, @p stride apart, from a dataset of rank 1.
void read_runs(const Dataset& dataset, Index start, Index stride, Index count, Index run,
               std::byte* data);

/// Global elements start + i * stride + [0, block), i < count, along each dimension, and where they
/// lie in another dataset.
struct Mapping {
  std::string source_file;  ///< A name in the folder of the file that maps; empty for itself.
  std::string source_path;
  Shape source_shape;
  Box source_box;
  Dims start;
  Dims stride;
  Dims count;
  Dims block;
};
Dataset create_virtual(const File& file, const std::string& path, Type type, const Shape& shape,
                       const std::vector<Mapping>& mappings);
/// A soft link: @p path is another name of @p target.
void link(const File& file, const std::string& target, const std::string& path);
/// Likewise of @p target in @p target_file, a name in the folder of @p file.
void link_external(const File& file, const std::string& target_file, const std::string& target,
                   const std::string& path);
void create_group(const File& file, const std::string& path);
Object open_group(const File& file, const std::string& path);

bool exists(const File& file, const std::string& path);

enum class Kind : std::uint8_t { group, dataset, link, other };
struct Member {
  std::string name;
  Kind kind = Kind::other;
};
/// What a group holds, by name; nothing when there is no such group. A link into another file
/// counts as what it leads to; Kind::link is one inside the file.
std::vector<Member> members(const File& file, const std::string& group);

/// An object that carries attributes, and its name for messages.
struct Owner {
  const Object& object;
  std::string label;
};
Owner owner_of(const Dataset& dataset);
void write_attribute(const Owner& owner, const char* name, DType dtype, const Shape& shape,
                     const void* data);
/// Text for people, of variable length: what h5py gives as str. m2n itself relies on none, because
/// a damaged one (in HDF5's global heap, which has no checksum) can crash the library.
void write_attribute(const Owner& owner, const char* name, const std::string& text);
/// Text that m2n relies on.
void write_fixed_attribute(const Owner& owner, const char* name, std::string_view text);
/// Also of variable length, as other programs write them.
std::optional<std::string> text_attribute(const Owner& owner, const char* name);
struct Integers {
  std::vector<Index> values;
  Shape shape;
};
std::optional<Integers> integer_attribute(const Owner& owner, const char* name);
std::optional<std::uint64_t> word_attribute(const Owner& owner, const char* name);

/// The whole of a scalar text, or of a column of them, without padding; either kind of string.
std::vector<std::string> read_texts(const File& file, const std::string& path);
/// The element type that other programs' files say by their storage alone.
std::optional<DType> stored_dtype(const Dataset& dataset);
/// True when the dataset's elements are stored exactly as @p type says.
bool stored_as(const Dataset& dataset, const Type& type);
/// "u32", "text", "pieces" or HDF5's class, for lists.
std::string type_name(const Dataset& dataset);

std::string library_version();

/// XXH3-64 over bytes in the order in which they are added.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  void add(const std::byte* data, std::uint64_t bytes);
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Of what the file holds now. Texts of variable length, which m2n never writes, have none.
std::uint64_t checksum_of(const Dataset& dataset);

}  // namespace m2n::h5
