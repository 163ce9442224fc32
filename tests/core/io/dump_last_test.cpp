// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Linked last: looks back at what all tests of dumps have printed.

#include <unistd.h>

#include <iostream>
#include <memory>

#include "tests/core/io/dump_support.hpp"

namespace m2n {
namespace {

using namespace testing;

/// Everything that the process writes to stderr while tests run, so that the last test can look for
/// HDF5's own diagnostics in it.
class StderrWatch {
 public:
  StderrWatch() {
    std::cerr.flush();
    real_ = ::dup(STDERR_FILENO);
    std::string name = (std::filesystem::temp_directory_path() / "m2n-stderr-XXXXXX").string();
    file_ = ::mkstemp(name.data());
    ::unlink(name.c_str());
    ::dup2(file_, STDERR_FILENO);
  }
  ~StderrWatch() {
    const std::string text = so_far();
    ::dup2(real_, STDERR_FILENO);
    std::cerr << text;
  }
  std::string so_far() const {
    std::cerr.flush();
    std::string text(static_cast<std::size_t>(::lseek(file_, 0, SEEK_END)), '\0');
    const ssize_t got = ::pread(file_, text.data(), text.size(), 0);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return text;
  }

 private:
  int real_ = -1;
  int file_ = -1;
};
struct Watched {
  static inline std::unique_ptr<StderrWatch> watch;
  Watched() { watch = std::make_unique<StderrWatch>(); }
  ~Watched() { watch.reset(); }
};
BOOST_TEST_GLOBAL_FIXTURE(Watched);

BOOST_AUTO_TEST_SUITE(core_io)
BOOST_AUTO_TEST_SUITE(dump)

BOOST_AUTO_TEST_CASE(hdf5_printed_nothing) {
  const std::string text = Watched::watch->so_far();
  BOOST_TEST(!contains(text, "HDF5-DIAG"), text);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
