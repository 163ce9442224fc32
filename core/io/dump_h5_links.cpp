// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Names in a dump: virtual datasets, links, groups and what they hold.

#include <algorithm>

#include "core/io/dump_h5_calls.hpp"

namespace m2n::h5 {

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
  // In the order of the file: to sort, HDF5 1.10 makes a table, of which it frees entries that it
  // never filled when the group is damaged.
  check(H5Literate(object.id(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, take, &out), "list", label);
  std::sort(out.begin(), out.end(),
            [](const Member& a, const Member& b) { return a.name < b.name; });
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

}  // namespace m2n::h5
