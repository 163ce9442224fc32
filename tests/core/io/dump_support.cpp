// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/core/io/dump_support.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <random>

#include "core/tensor/digest.hpp"

namespace m2n::testing {

std::uint64_t seed() {
  static const std::uint64_t kSeed = [] {
    const char* given = std::getenv("M2N_TEST_SEED");
    const std::uint64_t value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "M2N_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return kSeed;
}

std::ostream& operator<<(std::ostream& os, const DTypeCase& c) { return os << to_string(c.dtype); }

std::vector<DTypeCase> byte_sized() {
  std::vector<DTypeCase> out;
  for (const DType dtype : all_dtypes()) {
    if (is_byte_sized(dtype)) {
      out.push_back({dtype});
    }
  }
  return out;
}

std::vector<std::byte> global_tensor(const std::string& name, const Shape& shape, DType dtype) {
  std::vector<std::byte> out(static_cast<std::size_t>(element_count(shape)) * bytes_of(dtype));
  fill_synthetic(shape, Box::whole(shape), dtype, synthetic_seed(name), out.data(),
                 row_major(shape));
  return out;
}

void copy_box(const Shape& shape, const Box& box, std::uint64_t item, std::byte* global,
              std::byte* part, Index first, const Strides& strides, bool to_part) {
  const Strides global_strides = row_major(shape);
  const Index count = box.volume();
  const Shape extents = box.extents();
  for (Index i = 0; i < count; ++i) {
    Index rest = i;
    Index at = 0;
    Index local = first;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const Index c = rest % extents[d];
      rest /= extents[d];
      at += (box.lo[d] + c) * global_strides[d];
      local += c * strides[d];
    }
    std::byte* a = global + static_cast<std::uint64_t>(at) * item;
    std::byte* b = part + static_cast<std::uint64_t>(local) * item;
    std::memcpy(to_part ? b : a, to_part ? a : b, item);
  }
}

std::vector<std::byte> compact_tensor(const CompactShard& shard, const Shape& shape, DType dtype,
                                      std::vector<std::byte> global) {
  const std::uint64_t item = bytes_of(dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(element_count(shard.local_shape)) * item);
  for (const Piece& piece : shard.pieces) {
    copy_box(shape, piece.box, item, global.data(), out.data(),
             static_cast<Index>(piece.view.offset_bytes / item), piece.view.strides, true);
  }
  return out;
}

Side side_of(const std::string& name, Layout layout) {
  const std::uint32_t slots = layout.slot_count();
  Side side{std::make_shared<const Layout>(std::move(layout)), {}};
  for (std::uint32_t i = 0; i < slots; ++i) {
    side.buffers.push_back(name + "#" + std::to_string(i));
  }
  return side;
}

Parameter replicated(const std::string& name, const Shape& shape, DType dtype) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.source =
      side_of(name, Layout::sharded(shape, dtype, Mesh({1}, 0), {Placement::replicate()}));
  parameter.destination =
      side_of(name, Layout::sharded(shape, dtype, Mesh({1}, 1), {Placement::replicate()}));
  return parameter;
}

const Side& side(const Parameter& parameter, Role role) {
  return role == Role::source ? parameter.source : parameter.destination;
}

void write_side(DumpWriter& dump, const Parameter& parameter, Role role) {
  const Layout& layout = *side(parameter, role).layout;
  const auto global = global_tensor(parameter.name, parameter.shape, layout.dtype());
  for (const Rank rank : layout.ranks()) {
    const CompactShard shard = layout.compact(rank);
    const auto data = compact_tensor(shard, parameter.shape, layout.dtype(), global);
    dump.shard(role, rank, parameter, shard, data.data());
  }
}

void write_tensor(const std::filesystem::path& file, const Parameter& parameter,
                  const std::vector<std::byte>& data, const DumpOptions& options) {
  DumpWriter dump(file, options);
  dump.shard(Role::source, 0, parameter, parameter.source.layout->compact(0), data.data());
  dump.commit();
}

Raw raw_read(const std::filesystem::path& path, const std::string& name) {
  const h5::Lock lock;
  Raw out;
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, name.c_str(), H5P_DEFAULT);
  BOOST_REQUIRE_GE(dataset, 0);
  const hid_t type = H5Dget_type(dataset);
  const hid_t space = H5Dget_space(dataset);
  const hid_t properties = H5Dget_create_plist(dataset);
  out.type_class = H5Tget_class(type);
  out.size = H5Tget_size(type);
  if (out.type_class == H5T_INTEGER) {
    out.sign = H5Tget_sign(type);
  }
  out.shape.resize(static_cast<std::size_t>(H5Sget_simple_extent_ndims(space)));
  H5Sget_simple_extent_dims(space, out.shape.data(), nullptr);
  out.layout = H5Pget_layout(properties);
  if (out.layout == H5D_CHUNKED) {
    out.chunk.resize(out.shape.size());
    H5Pget_chunk(properties, static_cast<int>(out.chunk.size()), out.chunk.data());
  }
  out.offset = H5Dget_offset(dataset);
  out.bytes.resize(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)) * out.size);
  if (!out.bytes.empty()) {
    BOOST_REQUIRE_GE(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.bytes.data()), 0);
  }
  H5Pclose(properties);
  H5Sclose(space);
  H5Tclose(type);
  H5Dclose(dataset);
  H5Fclose(file);
  return out;
}

std::vector<std::string> raw_texts(const std::filesystem::path& path, const std::string& name) {
  const Raw raw = raw_read(path, name);
  BOOST_REQUIRE(raw.type_class == H5T_STRING);
  std::vector<std::string> out;
  for (std::size_t i = 0; i < raw.bytes.size(); i += raw.size) {
    std::string one(reinterpret_cast<const char*>(raw.bytes.data()) + i, raw.size);
    one.erase(one.find_last_not_of('\0') + 1);
    out.push_back(one);
  }
  return out;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void expect_error(Errc code, const std::vector<std::string>& parts,
                  const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    BOOST_TEST((error.code() == code), to_string(error.code()) << ": " << error.what());
    for (const std::string& part : parts) {
      BOOST_TEST(contains(error.what(), part), "'" << error.what() << "' lacks '" << part << "'");
    }
    return;
  }
  BOOST_ERROR("nothing was thrown");
}

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    out.push_back(entry.path().filename().string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::ostream& operator<<(std::ostream& os, const LayoutCase& c) { return os << c.why; }

Layout mesh_layout(const Shape& shape, const Dims& dims, const std::vector<Placement>& placements) {
  return Layout::sharded(shape, DType::f32, Mesh(dims, 0), placements);
}

const std::vector<LayoutCase>& layout_cases() {
  static const std::vector<LayoutCase> kCases = {
      {.why = "rows",
       .make =
           [] {
             return mesh_layout({8, 3}, {4}, {Placement::shard(0)});
           }},
      {.why = "uneven rows, and a rank without any",
       .make =
           [] {
             return mesh_layout({9, 3}, {4}, {Placement::shard(0)});
           }},
      {.why = "columns",
       .make =
           [] {
             return mesh_layout({4, 10}, {3}, {Placement::shard(1)});
           }},
      {.why = "both dimensions",
       .make =
           [] {
             return mesh_layout({5, 7}, {2, 3}, {Placement::shard(0), Placement::shard(1)});
           }},
      {.why = "FSDP2 over tensor parallel: strided rows",
       .make =
           [] {
             return mesh_layout({8, 8}, {2, 2},
                                {Placement::strided_shard(0, 2), Placement::shard(0)});
           }},
      {.why = "strided, uneven",
       .make =
           [] {
             return mesh_layout({13, 3}, {3}, {Placement::strided_shard(0, 3)});
           }},
      {.why = "strided along both dimensions, uneven",
       .make =
           [] {
             return mesh_layout({11, 13}, {2, 3},
                                {Placement::strided_shard(0, 3), Placement::strided_shard(1, 2)});
           }},
      {.why = "the disputed uneven strided shard",
       .make = [] { return mesh_layout({5}, {2}, {Placement::strided_shard(0, 2)}); }},
      {.why = "replicas",
       .make =
           [] {
             return mesh_layout({6, 2}, {2, 3}, {Placement::replicate(), Placement::shard(0)});
           }},
      {.why = "replicated whole",
       .make =
           [] {
             return mesh_layout({6, 2}, {3}, {Placement::replicate()});
           }},
      {.why = "three dimensions",
       .make =
           [] {
             return mesh_layout({4, 6, 5}, {2, 2}, {Placement::shard(2), Placement::shard(1)});
           }},
      {.why = "a flat buffer whose ranks start in the middle of a row",
       .make =
           [] {
             return Layout::flat({5, 7}, DType::f32, 4, 41, {0, 1, 2});
           }},
      {.why = "a flat buffer of three dimensions",
       .make =
           [] {
             return Layout::flat({5, 4, 5}, DType::f32, 8, 120, {0, 1});
           }},
      {.why = "pieces that form no grid, in no order",
       .make =
           [] {
             return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                            {{0, {{Dims{2, 0}, Dims{4, 3}}, {0, 0, {4, 1}}}},
                                             {0, {{Dims{0, 0}, Dims{1, 4}}, {0, 64, {4, 1}}}},
                                             {1, {{Dims{1, 0}, Dims{2, 4}}, {0, 0, {4, 1}}}},
                                             {1, {{Dims{2, 3}, Dims{4, 4}}, {0, 64, {1, 1}}}}});
           }},
      {.why = "pieces that overlap",
       .make =
           [] {
             return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                            {{0, {{Dims{0, 0}, Dims{3, 4}}, {0, 0, {4, 1}}}},
                                             {1, {{Dims{1, 0}, Dims{4, 4}}, {0, 0, {4, 1}}}}});
           }},
      {.why = "a hole",
       .make =
           [] {
             return Layout::explicit_pieces({4, 4}, DType::f32, {0, 1},
                                            {{0, {{Dims{0, 0}, Dims{2, 4}}, {0, 0, {4, 1}}}},
                                             {1, {{Dims{2, 0}, Dims{4, 3}}, {0, 0, {3, 1}}}}});
           },
       .whole = false},
  };
  return kCases;
}

Parameter with_layout(const std::string& name, const Layout& layout) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = layout.shape();
  parameter.source = side_of(name, layout);
  parameter.destination = parameter.source;
  return parameter;
}

Plan first_holders(const Problem& problem) {
  PlanBuilder builder(problem, "first holders");
  for (const GeometryGroup& group : group_by_geometry(problem)) {
    Pattern pattern;
    pattern.geometry = group.geometry;
    const auto sources = group.geometry.source->pieces();
    const auto destinations = group.geometry.destination->pieces();
    for (std::uint32_t to = 0; to < destinations.size(); ++to) {
      std::vector<Box> missing{destinations[to].piece.box};
      for (std::uint32_t from = 0; from < sources.size() && !missing.empty(); ++from) {
        std::vector<Box> rest;
        for (const Box& wanted : missing) {
          const auto part = intersect(wanted, sources[from].piece.box);
          if (part && !part->empty()) {
            pattern.moves.push_back({static_cast<std::uint32_t>(pattern.boxes.size()), from,
                                     group.geometry.source_count() + to, 0});
            pattern.boxes.push_back(*part);
            subtract(wanted, *part, rest);
          } else {
            rest.push_back(wanted);
          }
        }
        missing = std::move(rest);
      }
    }
    const std::uint32_t number = builder.add(std::move(pattern));
    for (const std::uint32_t parameter : group.parameters) {
      builder.assign(parameter, number, parameter % 2);
    }
  }
  return std::move(builder).finish();
}

Parameter moved(const std::string& name, const Shape& shape, DType dtype, Rank sources,
                Rank destinations) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.source =
      side_of(name, Layout::sharded(shape, dtype, Mesh({sources}, 0), {Placement::shard(0)}));
  parameter.destination =
      side_of(name, Layout::sharded(shape, dtype, Mesh({destinations}, sources),
                                    {Placement::shard(static_cast<int>(shape.size()) - 1)}));
  return parameter;
}

pid_t start_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = body();
    } catch (...) {
      status = 98;
    }
    ::_exit(status);
  }
  return child;
}

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

bool die_after(std::chrono::nanoseconds delay) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer{};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(delay);
  itimerspec when{};
  when.it_value.tv_sec = seconds.count();
  when.it_value.tv_nsec = (delay - seconds).count();
  return ::timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 &&
         ::timer_settime(timer, 0, &when, nullptr) == 0;
}

}  // namespace m2n::testing
