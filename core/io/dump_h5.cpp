// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump_h5.hpp"

#define H5_USE_110_API  // what newer libraries then offer too
#include <hdf5.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.hpp"

namespace m2n::h5 {
namespace {

static_assert(std::is_same_v<hid_t, std::int64_t>);

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

[[noreturn]] void fail(std::string_view action, std::string_view object) {
  throw Error(Errc::io,
              "cannot " + std::string(action) + " " + std::string(object) + ": " + library_words());
}

/// Passes a result of HDF5 on, or throws: negative means failure in all of its calls.
template <class Result>
Result check(Result result, std::string_view action, std::string_view object) {
  if (result < 0) [[unlikely]] {
    fail(action, object);
  }
  return result;
}

std::string label_of(const File& file, const std::string& path, std::string_view kind = "dataset") {
  return std::string(kind) + " '" + path + "' of '" + file.path.string() + "'";
}

using Extents = std::array<hsize_t, kMaxRank>;

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

/// Selects @p box; a scalar is always selected whole.
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

/// Makes the groups on the way, and spells names in UTF-8.
Object link_properties() {
  Object list = property_list(H5P_LINK_CREATE);
  check(H5Pset_create_intermediate_group(list.id(), 1), "set up", "HDF5 links");
  check(H5Pset_char_encoding(list.id(), H5T_CSET_UTF8), "set up", "HDF5 links");
  return list;
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

hid_t copy_type(hid_t type) { return check(H5Tcopy(type), "copy", "an HDF5 type"); }

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

bool is_variable_text(hid_t type) { return H5Tis_variable_str(type) > 0; }

/// Reads @p count strings of either kind. @p read calls HDF5 with a memory type and an address.
template <class Read>
std::vector<std::string> texts(hid_t type, std::size_t count, const Object& space,
                               const std::string& label, Read&& read) {
  if (H5Tget_class(type) != H5T_STRING) {
    throw Error(Errc::io, label + " should be text, and is not");
  }
  std::vector<std::string> out;
  if (count == 0) {
    return out;
  }
  out.reserve(count);
  if (is_variable_text(type)) {
    std::vector<char*> pointers(count, nullptr);
    check(read(type, static_cast<void*>(pointers.data())), "read", label);
    for (const char* pointer : pointers) {
      out.emplace_back(pointer == nullptr ? "" : pointer);
    }
    (void)H5Dvlen_reclaim(type, space.id(), H5P_DEFAULT, static_cast<void*>(pointers.data()));
    return out;
  }
  const std::size_t width = H5Tget_size(type);
  std::string all(width * count, '\0');
  check(read(type, static_cast<void*>(all.data())), "read", label);
  for (std::size_t i = 0; i < count; ++i) {
    std::string_view one(all.data() + i * width, width);
    one = one.substr(0, one.find_last_not_of('\0') + 1);  // npos + 1 is 0
    out.emplace_back(one);
  }
  return out;
}

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

}  // namespace

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

namespace {

/// HDF5 takes the names that a virtual dataset maps for formats.
std::string no_format(const std::string& name) {
  std::string out;
  for (const char c : name) {
    out.append(c == '%' ? 2 : 1, c);
  }
  return out;
}

}  // namespace

Dataset create_virtual(const File& file, const std::string& path, Type type, const Shape& shape,
                       const std::vector<Mapping>& mappings) {
  const std::string label = label_of(file, path, "virtual dataset");
  const Object properties = property_list(H5P_DATASET_CREATE);
  for (const Mapping& mapping : mappings) {
    const Object space = space_of(shape, label);
    const Extents start = extents_of(mapping.start);
    const Extents stride = extents_of(mapping.stride);
    const Extents count = extents_of(mapping.count);
    const Extents block = extents_of(mapping.block);
    check(H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), stride.data(), count.data(),
                              block.data()),
          "select a part of", label);
    const Object source = space_of(mapping.source_shape, label);
    select(source, mapping.source_box, label);
    // "." is the file itself, whatever its name becomes.
    const std::string from = mapping.source_file.empty() ? "." : no_format(mapping.source_file);
    check(H5Pset_virtual(properties.id(), space.id(), from.c_str(),
                         no_format(mapping.source_path).c_str(), source.id()),
          "map '" + mapping.source_path + "' into", label);
  }
  const Object space = space_of(shape, label);
  const Object links = link_properties();
  Object object(check(H5Dcreate2(file.object.id(), path.c_str(), type.object.id(), space.id(),
                                 links.id(), properties.id(), H5P_DEFAULT),
                      "create", label));
  return {std::move(object), std::move(type), shape, label, true};
}

void link(const File& file, const std::string& target, const std::string& path) {
  const Object links = link_properties();
  check(H5Lcreate_soft(target.c_str(), file.object.id(), path.c_str(), links.id(), H5P_DEFAULT),
        "link", label_of(file, path));
}

void link_external(const File& file, const std::string& target_file, const std::string& target,
                   const std::string& path) {
  const Object links = link_properties();
  check(H5Lcreate_external(target_file.c_str(), target.c_str(), file.object.id(), path.c_str(),
                           links.id(), H5P_DEFAULT),
        "link", label_of(file, path));
}

void create_group(const File& file, const std::string& path) {
  const Object links = link_properties();
  const Object group(
      check(H5Gcreate2(file.object.id(), path.c_str(), links.id(), H5P_DEFAULT, H5P_DEFAULT),
            "create", label_of(file, path, "group")));
}

Object open_group(const File& file, const std::string& path) {
  return Object(check(H5Gopen2(file.object.id(), path.c_str(), H5P_DEFAULT), "open",
                      label_of(file, path, "group")));
}

bool exists(const File& file, const std::string& path) {
  for (std::size_t at = 1; at != std::string::npos && at < path.size();) {
    at = path.find('/', at);
    const std::string part = path.substr(0, at);
    if (check(H5Lexists(file.object.id(), part.c_str(), H5P_DEFAULT), "look for",
              label_of(file, part, "object")) == 0) {
      return false;
    }
    at = at == std::string::npos ? at : at + 1;
  }
  return true;
}

std::vector<Member> members(const File& file, const std::string& group) {
  std::vector<Member> out;
  if (!exists(file, group)) {
    return out;
  }
  const std::string label = label_of(file, group, "group");
  const Object object = open_group(file, group);
  const auto take = [](hid_t, const char* name, const H5L_info_t* info, void* data) -> herr_t {
    try {
      static_cast<std::vector<Member>*>(data)->push_back(
          {name, info->type == H5L_TYPE_SOFT ? Kind::link : Kind::other});
      return 0;
    } catch (...) {  // not through a C library
      return -1;
    }
  };
  check(H5Literate(object.id(), H5_INDEX_NAME, H5_ITER_INC, nullptr, take, &out), "list", label);
  const std::string prefix = group == "/" ? group : group + "/";
  for (Member& member : out) {
    if (member.kind == Kind::link) {
      continue;
    }
    const Object child(check(H5Oopen(object.id(), member.name.c_str(), H5P_DEFAULT), "open",
                             label_of(file, prefix + member.name, "object")));
    switch (H5Iget_type(child.id())) {
      case H5I_GROUP:
        member.kind = Kind::group;
        break;
      case H5I_DATASET:
        member.kind = Kind::dataset;
        break;
      default:
        break;
    }
  }
  return out;
}

Owner owner_of(const Dataset& dataset) { return {dataset.object, dataset.label}; }

namespace {

std::string label_of(const Owner& owner, const char* name) {
  return std::string("attribute '") + name + "' of " + owner.label;
}

void write_attribute(const Owner& owner, const char* name, const Type& type, const Shape& shape,
                     const void* data) {
  const std::string label = label_of(owner, name);
  const Object space = space_of(shape, label);
  const Object attribute(check(
      H5Acreate2(owner.object.id(), name, type.object.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT),
      "create", label));
  if (element_count(shape) > 0) {
    check(H5Awrite(attribute.id(), type.object.id(), data), "write", label);
  }
}

std::optional<Object> open_attribute(const Owner& owner, const char* name,
                                     const std::string& label) {
  if (check(H5Aexists(owner.object.id(), name), "look for", label) == 0) {
    return std::nullopt;
  }
  return Object(check(H5Aopen(owner.object.id(), name, H5P_DEFAULT), "open", label));
}

}  // namespace

void write_attribute(const Owner& owner, const char* name, DType dtype, const Shape& shape,
                     const void* data) {
  write_attribute(owner, name, type_of(dtype), shape, data);
}

void write_attribute(const Owner& owner, const char* name, const std::string& text) {
  Type type{Object(copy_type(H5T_C_S1)), sizeof(char*)};
  check(std::min({H5Tset_size(type.object.id(), H5T_VARIABLE),
                  H5Tset_cset(type.object.id(), H5T_CSET_UTF8)}),
        "make", "an HDF5 text type");
  const char* pointer = text.c_str();
  write_attribute(owner, name, type, {}, static_cast<const void*>(&pointer));
}

void write_fixed_attribute(const Owner& owner, const char* name, std::string_view text) {
  write_attribute(owner, name, text_type(text.size()), {}, text.data());
}

std::optional<std::string> text_attribute(const Owner& owner, const char* name) {
  const std::string label = label_of(owner, name);
  const std::optional<Object> attribute = open_attribute(owner, name, label);
  if (!attribute) {
    return std::nullopt;
  }
  const Object type(check(H5Aget_type(attribute->id()), "ask for the type of", label));
  const Object space(check(H5Aget_space(attribute->id()), "ask for the shape of", label));
  if (element_count(shape_of(space, label)) != 1) {
    throw Error(Errc::io, label + " should be one text, and is not");
  }
  return texts(type.id(), 1, space, label,
               [&](hid_t memory, void* to) { return H5Aread(attribute->id(), memory, to); })
      .front();
}

std::optional<Integers> integer_attribute(const Owner& owner, const char* name) {
  const std::string label = label_of(owner, name);
  const std::optional<Object> attribute = open_attribute(owner, name, label);
  if (!attribute) {
    return std::nullopt;
  }
  const Object type(check(H5Aget_type(attribute->id()), "ask for the type of", label));
  if (H5Tget_class(type.id()) != H5T_INTEGER) {
    throw Error(Errc::io, label + " should hold integers, and does not");
  }
  const Object space(check(H5Aget_space(attribute->id()), "ask for the shape of", label));
  Integers out{{}, shape_of(space, label)};
  out.values.resize(static_cast<std::size_t>(element_count(out.shape)));
  if (!out.values.empty()) {
    check(H5Aread(attribute->id(), H5T_NATIVE_INT64, out.values.data()), "read", label);
  }
  return out;
}

std::optional<std::uint64_t> word_attribute(const Owner& owner, const char* name) {
  const std::string label = label_of(owner, name);
  const std::optional<Object> attribute = open_attribute(owner, name, label);
  if (!attribute) {
    return std::nullopt;
  }
  const Object type(check(H5Aget_type(attribute->id()), "ask for the type of", label));
  const Object space(check(H5Aget_space(attribute->id()), "ask for the shape of", label));
  if (H5Tget_class(type.id()) != H5T_INTEGER || element_count(shape_of(space, label)) != 1) {
    throw Error(Errc::io, label + " should be one integer, and is not");
  }
  std::uint64_t word = 0;
  check(H5Aread(attribute->id(), H5T_NATIVE_UINT64, &word), "read", label);
  return word;
}

std::vector<std::string> read_texts(const File& file, const std::string& path) {
  const Dataset dataset = open_dataset(file, path);
  const Object space = space_of(dataset.shape, dataset.label);
  return texts(dataset.type.object.id(), static_cast<std::size_t>(element_count(dataset.shape)),
               space, dataset.label, [&](hid_t memory, void* to) {
                 return H5Dread(dataset.object.id(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, to);
               });
}

bool stored_as(const Dataset& dataset, const Type& type) {
  return H5Tequal(dataset.type.object.id(), type.object.id()) > 0;
}

std::optional<DType> stored_dtype(const Dataset& dataset) {
  for (const DType dtype :
       {DType::u8, DType::i8, DType::i16, DType::u16, DType::f16, DType::i32, DType::u32,
        DType::f32, DType::c64, DType::f64, DType::i64, DType::u64}) {
    if (stored_as(dataset, type_of(dtype))) {
      return dtype;
    }
  }
  return std::nullopt;
}

std::string type_name(const Dataset& dataset) {
  if (const std::optional<DType> dtype = stored_dtype(dataset)) {
    return std::string(to_string(*dtype));
  }
  switch (H5Tget_class(dataset.type.object.id())) {
    case H5T_STRING:
      return "text";
    case H5T_COMPOUND:
      return "compound";
    case H5T_INTEGER:
      return "integer";
    case H5T_FLOAT:
      return "float";
    default:
      return "other";
  }
}

std::string library_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  check(H5get_libversion(&major, &minor, &release), "ask for", "the version of HDF5");
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

struct Checksum::State {
  State() { XXH3_64bits_reset(&xxh); }
  XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(const std::byte* data, std::uint64_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, bytes);
}

std::uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh); }

std::uint64_t checksum_of(const Dataset& dataset) {
  if (is_variable_text(dataset.type.object.id())) {
    throw Error(Errc::io, dataset.label + " is text of variable length, which has no checksum");
  }
  Checksum checksum;
  std::vector<std::byte> buffer;
  for_each_block(dataset.shape, dataset.type.bytes, kLargestChunkBytes, [&](const Box& box) {
    buffer.resize(static_cast<std::size_t>(box.volume()) * dataset.type.bytes);
    read_box(dataset, box, buffer.data());
    checksum.add(buffer.data(), buffer.size());
  });
  return checksum.value();
}

}  // namespace m2n::h5
