// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Attributes, texts and checksums of a dump.

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/io/dump_h5_calls.hpp"

namespace m2n::h5 {

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
