// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the tests of dumps share: tensors whose elements all differ, and HDF5 asked directly.

#define H5_USE_110_API
#include <hdf5.h>
#include <sys/types.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"
#include "core/plan/plan_builder.hpp"
#include "core/tensor/copy.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n::testing {

/// A seed for everything random here; M2N_TEST_SEED repeats a run.
std::uint64_t seed();

struct DTypeCase {
  DType dtype;
};
std::ostream& operator<<(std::ostream& os, const DTypeCase& c);
std::vector<DTypeCase> byte_sized();

/// Every element different, as far as the type has room: values of a synthetic tensor.
std::vector<std::byte> global_tensor(const std::string& name, const Shape& shape, DType dtype);

/// Copies between a global tensor and a box of it elsewhere, element by element.
void copy_box(const Shape& shape, const Box& box, std::uint64_t item, std::byte* global,
              std::byte* part, Index first, const Strides& strides, bool to_part);
std::vector<std::byte> compact_tensor(const CompactShard& shard, const Shape& shape, DType dtype,
                                      std::vector<std::byte> global);

Side side_of(const std::string& name, Layout layout);
const Side& side(const Parameter& parameter, Role role);
Layout mesh_layout(const Shape& shape, const Dims& dims, const std::vector<Placement>& placements);
/// One rank on either side.
Parameter replicated(const std::string& name, const Shape& shape, DType dtype);
/// The same layout on both sides.
Parameter with_layout(const std::string& name, const Layout& layout);
/// Rows to columns.
Parameter moved(const std::string& name, const Shape& shape, DType dtype, Rank sources,
                Rank destinations);
/// A plan that sends every destination piece from the first sources that hold it.
Plan first_holders(const Problem& problem);

struct LayoutCase {
  const char* why;
  std::function<Layout()> make;
  bool whole = true;  ///< The ranks together hold every element.
};
std::ostream& operator<<(std::ostream& os, const LayoutCase& c);
const std::vector<LayoutCase>& layout_cases();

/// Writes all shards of a side, with synthetic values of the parameter's name.
void write_side(DumpWriter& dump, const Parameter& parameter, Role role);
void write_tensor(const std::filesystem::path& file, const Parameter& parameter,
                  const std::vector<std::byte>& data, const DumpOptions& options = {});

/// What HDF5 says itself about a dataset, without m2n.
struct Raw {
  H5T_class_t type_class = H5T_NO_CLASS;
  std::size_t size = 0;
  H5T_sign_t sign = H5T_SGN_ERROR;
  std::vector<hsize_t> shape;
  std::vector<hsize_t> chunk;
  H5D_layout_t layout = H5D_LAYOUT_ERROR;
  haddr_t offset = HADDR_UNDEF;
  std::vector<std::byte> bytes;
};
Raw raw_read(const std::filesystem::path& path, const std::string& name);
std::vector<std::string> raw_texts(const std::filesystem::path& path, const std::string& name);

template <class Value>
std::vector<Value> raw_column(const std::filesystem::path& path, const std::string& name) {
  const Raw raw = raw_read(path, name);
  BOOST_REQUIRE_EQUAL(raw.bytes.size() % sizeof(Value), 0U);
  std::vector<Value> out(raw.bytes.size() / sizeof(Value));
  std::memcpy(out.data(), raw.bytes.data(), raw.bytes.size());
  return out;
}

bool contains(const std::string& text, const std::string& part);
/// Runs @p action, which must throw an Error of @p code whose text has every one of @p parts.
void expect_error(Errc code, const std::vector<std::string>& parts,
                  const std::function<void()>& action);
std::vector<std::string> files_in(const std::filesystem::path& folder);

template <class Value>
std::vector<std::byte> bytes_of_values(const std::vector<Value>& values) {
  std::vector<std::byte> out(values.size() * sizeof(Value));
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

/// Runs @p body in a child process. @return its process id.
pid_t start_child(const std::function<int()>& body);
int wait_for(pid_t child);
/// Kills this process, whatever it is doing then. @return false when there is no such timer.
bool die_after(std::chrono::nanoseconds delay);

}  // namespace m2n::testing
