// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump_h5.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_h5_calls.hpp"

namespace m2n::h5 {
namespace {

/// Elements are written as they lie in memory, and the schema says little-endian.
static_assert(std::endian::native == std::endian::little);

std::recursive_mutex& process_lock() {
  static std::recursive_mutex mutex;
  return mutex;
}

/// The library's most specific sentence about the call that just failed.
std::string library_words() {
  std::string words;
  const auto take = [](unsigned, const H5E_error2_t* entry, void* out) -> herr_t {
    if (entry->desc != nullptr) {
      static_cast<std::string*>(out)->assign(entry->desc);
    }
    return 1;  // the first is the innermost
  };
  (void)H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take, &words);
  (void)H5Eclear2(H5E_DEFAULT);
  return words.empty() ? "HDF5 gives no reason" : words;
}

/// Shape of the first of for_each_block()'s blocks, which is the largest.
Shape block_shape(const Shape& shape, std::uint64_t item_bytes, std::uint64_t limit) {
  Shape block = Shape::filled(shape.size(), 1);
  std::uint64_t budget = std::max<std::uint64_t>(limit / item_bytes, 1);
  for (std::size_t d = shape.size(); d-- > 0 && budget > 1;) {
    const auto extent = static_cast<std::uint64_t>(shape[d]);
    block[d] = static_cast<Index>(std::min(extent, budget));
    budget = extent > budget ? 1 : budget / extent;
  }
  return block;
}

hid_t predefined(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
    case DType::f8_e5m2:
    case DType::f8_e4m3:
    case DType::f8_e8m0:
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
      return copy_type(H5T_STD_U8LE);
    case DType::i8:
      return copy_type(H5T_STD_I8LE);
    case DType::i16:
      return copy_type(H5T_STD_I16LE);
    case DType::u16:
    case DType::bf16:
      return copy_type(H5T_STD_U16LE);
    case DType::i32:
      return copy_type(H5T_STD_I32LE);
    case DType::u32:
      return copy_type(H5T_STD_U32LE);
    case DType::f32:
      return copy_type(H5T_IEEE_F32LE);
    case DType::f64:
      return copy_type(H5T_IEEE_F64LE);
    case DType::i64:
      return copy_type(H5T_STD_I64LE);
    case DType::u64:
      return copy_type(H5T_STD_U64LE);
    case DType::f16: {
      const hid_t type = copy_type(H5T_IEEE_F32LE);
      check(std::min({H5Tset_fields(type, 15, 10, 5, 0, 10), H5Tset_size(type, 2),
                      H5Tset_ebias(type, 15)}),
            "make", "the HDF5 type of f16");
      return type;
    }
    case DType::c64: {
      const hid_t type = check(H5Tcreate(H5T_COMPOUND, 8), "make", "the HDF5 type of c64");
      check(std::min(
                {H5Tinsert(type, "r", 0, H5T_IEEE_F32LE), H5Tinsert(type, "i", 4, H5T_IEEE_F32LE)}),
            "make", "the HDF5 type of c64");
      return type;
    }
    case DType::f4:
    case DType::f6_e2m3:
    case DType::f6_e3m2:
      break;
  }
  throw Error(Errc::bad_argument, "dumps hold elements of whole bytes, and " +
                                      std::string(to_string(dtype)) + " packs several into one");
}

}  // namespace

[[noreturn]] void fail(std::string_view action, std::string_view object) {
  throw Error(Errc::io,
              "cannot " + std::string(action) + " " + std::string(object) + ": " + library_words());
}

std::string label_of(const File& file, const std::string& path, std::string_view kind) {
  return std::string(kind) + " '" + path + "' of '" + file.path.string() + "'";
}

Extents extents_of(const Dims& dims) {
  Extents extents{};
  for (std::size_t d = 0; d < dims.size(); ++d) {
    extents[d] = static_cast<hsize_t>(dims[d]);
  }
  return extents;
}

Object space_of(const Shape& shape, const std::string& label) {
  if (shape.empty()) {
    return Object(check(H5Screate(H5S_SCALAR), "describe the shape of", label));
  }
  const Extents extents = extents_of(shape);
  return Object(check(H5Screate_simple(static_cast<int>(shape.size()), extents.data(), nullptr),
                      "describe the shape of", label));
}

void select(const Object& space, const Box& box, const std::string& label) {
  if (box.rank() == 0) {
    return;
  }
  const Extents start = extents_of(box.lo);
  const Extents count = extents_of(box.extents());
  check(
      H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr),
      "select a part of", label);
}

Object property_list(hid_t of) {
  return Object(check(H5Pcreate(of), "make", "an HDF5 property list"));
}

Object link_properties() {
  Object list = property_list(H5P_LINK_CREATE);
  check(H5Pset_create_intermediate_group(list.id(), 1), "set up", "HDF5 links");
  check(H5Pset_char_encoding(list.id(), H5T_CSET_UTF8), "set up", "HDF5 links");
  return list;
}

hid_t copy_type(hid_t type) { return check(H5Tcopy(type), "copy", "an HDF5 type"); }

Shape shape_of(const Object& space, const std::string& label) {
  if (H5Sget_simple_extent_type(space.id()) == H5S_NULL) {
    return Shape{0};
  }
  const int rank = check(H5Sget_simple_extent_ndims(space.id()), "ask for the shape of", label);
  if (rank > static_cast<int>(kMaxRank)) {
    throw Error(Errc::io, label + " has " + std::to_string(rank) + " dimensions, above the limit " +
                              std::to_string(kMaxRank));
  }
  Extents extents{};
  check(H5Sget_simple_extent_dims(space.id(), extents.data(), nullptr), "ask for the shape of",
        label);
  Shape shape;
  for (int d = 0; d < rank; ++d) {
    if (extents[static_cast<std::size_t>(d)] >
        static_cast<hsize_t>(std::numeric_limits<Index>::max())) {
      throw Error(Errc::io, label + " has an extent above 2^63-1");
    }
    shape.push_back(static_cast<Index>(extents[static_cast<std::size_t>(d)]));
  }
  return shape;
}

Lock::Lock() : held_(process_lock()) { (void)H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

Object::Object(Object&& other) noexcept : id_(std::exchange(other.id_, -1)) {}

Object& Object::operator=(Object&& other) noexcept {
  std::swap(id_, other.id_);
  return *this;
}

Object::~Object() {
  if (id_ >= 0) {
    const Lock lock;
    (void)H5Idec_ref(id_);  // nothing useful to do with a failure here
  }
}

Type type_of(DType dtype) { return {Object(predefined(dtype)), bytes_of(dtype)}; }

Type text_type(std::uint64_t bytes) {
  // HDF5 keeps a type's size in 32 bits, and NumPy in 31.
  constexpr std::uint64_t kLargest = std::numeric_limits<std::int32_t>::max();
  if (bytes > kLargest) {
    throw Error(Errc::io, "a text of " + std::to_string(bytes) + " bytes does not fit into HDF5; " +
                              std::to_string(kLargest) + " do");
  }
  Type type{Object(copy_type(H5T_C_S1)), std::max<std::uint64_t>(bytes, 1)};
  check(std::min({H5Tset_size(type.object.id(), type.bytes),
                  H5Tset_strpad(type.object.id(), H5T_STR_NULLPAD),
                  H5Tset_cset(type.object.id(), H5T_CSET_UTF8)}),
        "make", "an HDF5 text type");
  return type;
}

Type piece_type(std::size_t rank) {
  const std::string what = "the HDF5 type of pieces";
  const hsize_t extent = rank;
  const Object row(check(H5Tarray_create2(H5T_STD_I64LE, 1, &extent), "make", what));
  Type type{{}, 8 * (3 * rank + 1)};
  type.object = Object(check(H5Tcreate(H5T_COMPOUND, type.bytes), "make", what));
  check(std::min({H5Tinsert(type.object.id(), "lo", 0, row.id()),
                  H5Tinsert(type.object.id(), "hi", 8 * rank, row.id()),
                  H5Tinsert(type.object.id(), "offset", 16 * rank, H5T_STD_I64LE),
                  H5Tinsert(type.object.id(), "strides", 16 * rank + 8, row.id())}),
        "make", what);
  return type;
}

std::uint64_t Dataset::bytes() const {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(shape)), type.bytes);
}

namespace {

Object access_properties() {
  Object access = property_list(H5P_FILE_ACCESS);
  // The 1.10 format: checksummed metadata, an "open for write" mark, large attributes.
  check(H5Pset_libver_bounds(access.id(), H5F_LIBVER_V110, H5F_LIBVER_V110), "set up",
        "HDF5 file access");
  return access;
}

}  // namespace

File create_file(const std::filesystem::path& path) {
  const Object access = access_properties();
  return {Object(check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()), "create",
                       "'" + path.string() + "'")),
          path};
}

File open_file(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw Error(Errc::io, "cannot open '" + path.string() + "': there is no such file");
  }
  if (!std::filesystem::is_regular_file(path, ignored)) {
    throw Error(Errc::io, "cannot open '" + path.string() + "': it is not a regular file");
  }
  if (H5Fis_hdf5(path.c_str()) == 0) {
    throw Error(Errc::io, "'" + path.string() + "' is not an HDF5 file; a dump is one");
  }
  return {Object(check(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), "open",
                       "'" + path.string() + "'")),
          path};
}

void close(File file) {
  check(H5Fflush(file.object.id(), H5F_SCOPE_GLOBAL), "flush", "'" + file.path.string() + "'");
  check(H5Fclose(file.object.release()), "close", "'" + file.path.string() + "'");
}

Dataset create_dataset(const File& file, const std::string& path, Type type, const Shape& shape,
                       std::uint64_t chunk_bytes, int deflate_level) {
  const std::string label = label_of(file, path);
  const Object properties = property_list(H5P_DATASET_CREATE);
  // Everything is written once, so nothing is filled first.
  check(H5Pset_fill_time(properties.id(), H5D_FILL_TIME_NEVER), "set up", label);
  if (chunk_bytes > 0 && !shape.empty() && element_count(shape) > 0) {
    const Shape chunk = block_shape(shape, type.bytes, std::min(chunk_bytes, kLargestChunkBytes));
    const Extents extents = extents_of(chunk);
    check(H5Pset_chunk(properties.id(), static_cast<int>(chunk.size()), extents.data()), "chunk",
          label);
    if (deflate_level > 0) {
      check(H5Pset_deflate(properties.id(), static_cast<unsigned>(deflate_level)), "compress",
            label);
    }
  }
  const Object space = space_of(shape, label);
  const Object links = link_properties();
  Object object(check(H5Dcreate2(file.object.id(), path.c_str(), type.object.id(), space.id(),
                                 links.id(), properties.id(), H5P_DEFAULT),
                      "create", label));
  return {std::move(object), std::move(type), shape, label, false};
}

namespace {

/// Names the file that an object really lies in, which a link may have led to.
std::string label_in_own_file(const File& file, const std::string& path, const Object& object) {
  std::array<char, 4096> name{};
  const ssize_t length = H5Fget_name(object.id(), name.data(), name.size());
  if (length <= 0 || static_cast<std::size_t>(length) >= name.size()) {
    return label_of(file, path);
  }
  const std::filesystem::path own = std::string_view(name.data(), static_cast<std::size_t>(length));
  return own.filename() == file.path.filename() ? label_of(file, path)
                                                : label_of({Object(), own}, path);
}

}  // namespace

Dataset open_dataset(const File& file, const std::string& path) {
  Dataset dataset;
  dataset.label = label_of(file, path);
  if (!exists(file, path)) {
    throw Error(Errc::io, "'" + file.path.string() + "' has no dataset '" + path + "'");
  }
  dataset.object =
      Object(check(H5Dopen2(file.object.id(), path.c_str(), H5P_DEFAULT), "open", dataset.label));
  dataset.label = label_in_own_file(file, path, dataset.object);
  dataset.type.object =
      Object(check(H5Dget_type(dataset.object.id()), "ask for the type of", dataset.label));
  dataset.type.bytes = H5Tget_size(dataset.type.object.id());
  const Object space(
      check(H5Dget_space(dataset.object.id()), "ask for the shape of", dataset.label));
  dataset.shape = shape_of(space, dataset.label);
  const Object properties(check(H5Dget_create_plist(dataset.object.id()), "open", dataset.label));
  dataset.stitched = H5Pget_layout(properties.id()) == H5D_VIRTUAL;
  return dataset;
}

void for_each_block(const Shape& shape, std::uint64_t item_bytes, std::uint64_t limit,
                    const std::function<void(const Box&)>& block) {
  if (element_count(shape) == 0) {
    return;
  }
  const Shape step = block_shape(shape, item_bytes, limit);
  Dims lo = Dims::filled(shape.size(), 0);
  for (;;) {
    Box box{lo, lo};
    for (std::size_t d = 0; d < shape.size(); ++d) {
      box.hi[d] = std::min(shape[d], lo[d] + step[d]);
    }
    block(box);
    std::size_t d = shape.size();
    while (d-- > 0) {
      lo[d] += step[d];
      if (lo[d] < shape[d]) {
        break;
      }
      lo[d] = 0;
      if (d == 0) {
        return;
      }
    }
    if (shape.empty()) {
      return;
    }
  }
}

namespace {

/// Calls @p transfer(memory space, file space, address) for blocks of @p box.
template <class Byte, class Transfer>
void in_blocks(const Dataset& dataset, const Box& box, Byte* data, Transfer&& transfer) {
  std::uint64_t done = 0;
  for_each_block(box.extents(), dataset.type.bytes, kLargestCallBytes, [&](const Box& part) {
    Box there = part;
    for (std::size_t d = 0; d < part.rank(); ++d) {
      there.lo[d] += box.lo[d];
      there.hi[d] += box.lo[d];
    }
    const Object memory = space_of(part.extents(), dataset.label);
    const Object space = space_of(dataset.shape, dataset.label);
    select(space, there, dataset.label);
    transfer(memory.id(), space.id(), data + done);
    done += static_cast<std::uint64_t>(part.volume()) * dataset.type.bytes;
  });
}

}  // namespace

void write_box(const Dataset& dataset, const Box& box, const std::byte* data) {
  in_blocks(dataset, box, data, [&](hid_t memory, hid_t space, const std::byte* from) {
    check(H5Dwrite(dataset.object.id(), dataset.type.object.id(), memory, space, H5P_DEFAULT, from),
          "write", dataset.label);
  });
}

void read_box(const Dataset& dataset, const Box& box, std::byte* data) {
  in_blocks(dataset, box, data, [&](hid_t memory, hid_t space, std::byte* to) {
    check(H5Dread(dataset.object.id(), dataset.type.object.id(), memory, space, H5P_DEFAULT, to),
          "read", dataset.label);
  });
}

void read_runs(const Dataset& dataset, Index start, Index stride, Index count, Index run,
               std::byte* data) {
  const std::uint64_t run_bytes = static_cast<std::uint64_t>(run) * dataset.type.bytes;
  if (count == 1 || run_bytes > kLargestCallBytes) {
    for (Index i = 0; i < count; ++i, start += stride, data += run_bytes) {
      read_box(dataset, {Dims{start}, Dims{start + run}}, data);
    }
    return;
  }
  const auto runs_a_call =
      static_cast<Index>(kLargestCallBytes / std::max<std::uint64_t>(run_bytes, 1));
  for (Index i = 0; i < count;) {
    const Index now = std::min(count - i, runs_a_call);
    const Object memory = space_of(Shape{now, run}, dataset.label);
    const Object space = space_of(dataset.shape, dataset.label);
    const Extents from = extents_of(Dims{start + i * stride});
    const Extents step = extents_of(Dims{stride});
    const Extents runs = extents_of(Dims{now});
    const Extents block = extents_of(Dims{run});
    check(H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, from.data(), step.data(), runs.data(),
                              block.data()),
          "select a part of", dataset.label);
    check(H5Dread(dataset.object.id(), dataset.type.object.id(), memory.id(), space.id(),
                  H5P_DEFAULT, data),
          "read", dataset.label);
    i += now;
    data += static_cast<std::uint64_t>(now) * run_bytes;
  }
}

}  // namespace m2n::h5
