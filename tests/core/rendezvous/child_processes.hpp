// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Ranks that are processes of their own, forked from the test.

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "core/layout/mesh.hpp"
#include "core/rendezvous/file_descriptor.hpp"

namespace m2n::testing {

/// Forked children that run one function each and report in lines. The test must have no other
/// threads when it starts them. None outlives this object.
class ChildProcesses {
 public:
  ChildProcesses() = default;
  ChildProcesses(const ChildProcesses&) = delete;
  ChildProcesses& operator=(const ChildProcesses&) = delete;
  ~ChildProcesses();

  /// The child runs @p body, whose argument reports a line, and then reports "done", or what it
  /// threw: "threw <text>".
  using Report = std::function<void(const std::string&)>;
  void start(Rank rank, const std::function<void(const Report&)>& body);

  /// The next line of @p rank; "ended" when it has ended without another one. Throws after two
  /// minutes.
  std::string line(Rank rank);
  void send_signal(Rank rank, int signal);
  /// Waits for the end of @p rank. @return Its status as from waitpid().
  int wait(Rank rank);

 private:
  struct Child {
    pid_t pid = -1;
    FileDescriptor lines;
    std::string read;
  };
  Child& child(Rank rank) { return children_.at(static_cast<std::size_t>(rank)); }

  std::vector<Child> children_;
};

/// How many descriptors this process has open.
std::size_t open_descriptors();

}  // namespace m2n::testing
