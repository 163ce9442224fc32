// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the files that call HDF5 share: its header, and how its results become errors.

#define H5_USE_110_API  // what newer libraries then offer too
#include <hdf5.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/io/dump_h5.hpp"

namespace m2n::h5 {

static_assert(std::is_same_v<hid_t, std::int64_t>);

/// @throws Error{io} with the library's most specific sentence about the call that just failed.
[[noreturn]] void fail(std::string_view action, std::string_view object);

/// Passes a result of HDF5 on, or throws: negative means failure in all of its calls.
template <class Result>
Result check(Result result, std::string_view action, std::string_view object) {
  if (result < 0) [[unlikely]] {
    fail(action, object);
  }
  return result;
}

std::string label_of(const File& file, const std::string& path, std::string_view kind = "dataset");

using Extents = std::array<hsize_t, kMaxRank>;
Extents extents_of(const Dims& dims);
Object space_of(const Shape& shape, const std::string& label);
Shape shape_of(const Object& space, const std::string& label);
/// Selects @p box; a scalar is always selected whole.
void select(const Object& space, const Box& box, const std::string& label);
Object property_list(hid_t of);
/// Makes the groups on the way, and spells names in UTF-8.
Object link_properties();
hid_t copy_type(hid_t type);
inline bool is_variable_text(hid_t type) { return H5Tis_variable_str(type) > 0; }

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

}  // namespace m2n::h5
