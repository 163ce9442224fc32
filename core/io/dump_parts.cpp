// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Dumps of several files: one that describes, and one a rank that holds shards.

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"
#include "core/io/dump_reader_impl.hpp"

namespace m2n {

std::string dump_part_name(const std::filesystem::path& dump, std::string_view run_id, Rank rank) {
  return dump.stem().string() + "." + std::string(run_id) + ".rank-" + std::to_string(rank) +
         dump.extension().string();
}

std::vector<std::string> dump_parts(const std::filesystem::path& file) {
  const h5::Lock lock;
  try {
    const h5::File opened = h5::open_file(file);
    return h5::exists(opened, "/parts/file") ? h5::read_texts(opened, "/parts/file")
                                             : std::vector<std::string>{};
  } catch (const Error&) {
    return {};
  }
}

void expect_parts(const std::filesystem::path& dump, const std::vector<std::string>& parts,
                  const std::string& run_id) {
  for (const std::string& name : parts) {
    const auto fail = [&](const std::string& why) {
      throw Error(Errc::io, "'" + dump.string() + "' needs '" + name + "' beside it, " + why);
    };
    if (name.empty() || name.find('/') != name.npos) {
      fail("which is no plain name of a file");
    }
    try {
      const DumpReader part(dump.parent_path() / name);
      if (part.fact("run_id") != run_id) {
        fail("which is of another run");
      }
    } catch (const Error& error) {
      fail(std::string("and that is no dump: ") + error.what());
    }
  }
}

void DumpWriter::Impl::write_parts() {
  std::sort(parts.begin(), parts.end());  // threads came in any order
  expect_parts(target.target(), parts, options.run_id);
  std::uint64_t longest = 0;
  for (const std::string& part : parts) {
    longest = std::max<std::uint64_t>(longest, part.size());
  }
  Column file_name = table("/parts", parts.size()).text_column("file", longest);
  for (const std::string& part : parts) {
    file_name.add_text(part);
  }
  file_name.finish();
}

}  // namespace m2n
