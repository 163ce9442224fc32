// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/atomic_file.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <iterator>

#include "core/error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace m2n {

using testing::read_file;
using testing::TemporaryFolder;

namespace {

std::ptrdiff_t files_in(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

bool is_io_error(const Error& error) { return error.code() == Errc::io; }

}  // namespace

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(atomic_file)

BOOST_AUTO_TEST_CASE(the_old_bytes_stay_until_commit_and_the_new_ones_after_it) {
  const TemporaryFolder folder;
  const auto target = folder.write("f", "old");
  AtomicFile file(target);
  file.write(std::string_view("ne"));
  file.write(std::string_view("w"));
  BOOST_TEST(read_file(target) == "old");
  file.commit();
  BOOST_TEST(read_file(target) == "new");
  BOOST_TEST(files_in(folder.path()) == 1);
}

BOOST_AUTO_TEST_CASE(a_file_that_is_given_up_leaves_no_trace) {
  const TemporaryFolder folder;
  const auto target = folder.write("f", "old");
  {
    AtomicFile file(target);
    file.write(std::string_view("new"));
    BOOST_TEST(files_in(folder.path()) == 2);
  }
  BOOST_TEST(read_file(target) == "old");
  BOOST_TEST(files_in(folder.path()) == 1);
}

BOOST_AUTO_TEST_CASE(another_library_may_write_the_temporary_file_by_its_name) {
  const TemporaryFolder folder;
  AtomicFile file(folder / "f");
  folder.write(file.path().filename().string(), "by name");
  file.commit();
  BOOST_TEST(read_file(folder / "f") == "by name");
}

BOOST_AUTO_TEST_CASE(two_files_for_one_target_do_not_meet) {
  const TemporaryFolder folder;
  AtomicFile first(folder / "f");
  AtomicFile second(folder / "f");
  first.write(std::string_view("first"));
  second.write(std::string_view("second"));
  second.commit();
  first.commit();
  BOOST_TEST(read_file(folder / "f") == "first");
  BOOST_TEST(files_in(folder.path()) == 1);
}

BOOST_AUTO_TEST_CASE(a_moved_file_is_removed_once) {
  const TemporaryFolder folder;
  {
    AtomicFile file(folder / "f");
    file.write(std::string_view("m"));
    AtomicFile moved(std::move(file));
    moved.write(std::string_view("oved"));
    moved.commit();
  }
  BOOST_TEST(read_file(folder / "f") == "moved");
}

BOOST_AUTO_TEST_CASE(a_link_is_followed_and_stays_a_link) {
  const TemporaryFolder folder;
  folder.write("real", "old");
  std::filesystem::create_symlink("real", folder / "link");
  AtomicFile file(folder / "link");
  file.write(std::string_view("new"));
  file.commit();
  BOOST_TEST(read_file(folder / "real") == "new");
  BOOST_TEST(std::filesystem::is_symlink(folder / "link"));
}

BOOST_AUTO_TEST_CASE(what_is_no_regular_file_is_not_replaced) {
  const TemporaryFolder folder;
  BOOST_CHECK_EXCEPTION(AtomicFile{folder.path()}, Error, is_io_error);
  BOOST_REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  BOOST_CHECK_EXCEPTION(AtomicFile{folder / "pipe"}, Error, is_io_error);
  BOOST_CHECK_EXCEPTION(AtomicFile{folder / ""}, Error, is_io_error);
  BOOST_TEST(files_in(folder.path()) == 1);
}

BOOST_AUTO_TEST_CASE(a_folder_that_is_not_there_is_named) {
  const TemporaryFolder folder;
  BOOST_CHECK_EXCEPTION(AtomicFile{folder.path() / "no" / "f"}, Error, [](const Error& error) {
    return is_io_error(error) && std::string(error.what()).find("/no/f") != std::string::npos;
  });
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
