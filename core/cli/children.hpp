// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Child processes that end with their parent, whatever ends it.

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/api/group.hpp"

namespace m2n::cli {

/// How a child ended.
struct ChildEnd {
  int status = 0;  ///< Exit status; 0 when a signal ended it.
  int signal = 0;
  bool ok() const noexcept { return status == 0 && signal == 0; }
};
/// "ended with status 3", "was killed by signal 9".
std::string to_string(const ChildEnd& end);

/// Processes of one program, started together.
///
/// - Threads: one, which must be the process's only one while it starts children.
/// - Errors: Error{io} with the system's words.
class Children final {
 public:
  /// Called with each whole line of a child's standard error, without its end.
  using OnLine = std::function<void(std::size_t child, const std::string& line)>;

  explicit Children(OnLine on_line) : on_line_(std::move(on_line)) {}
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  /// Kills those that still run.
  ~Children();

  /// Starts @p words (a path and its arguments). @param keep  Descriptors that stay open in it.
  /// @return its number, from 0.
  std::size_t start(const std::vector<std::string>& words, const std::vector<int>& keep);

  /// Looks after output and ends until @p done says so or the deadline passes.
  /// @return whether done.
  bool run(const std::function<bool()>& done, Deadline deadline);

  /// Sends @p signal to a child that still runs.
  void signal(std::size_t child, int signal) const;

  std::size_t size() const noexcept { return children_.size(); }
  /// Nothing while it runs.
  const std::optional<ChildEnd>& end(std::size_t child) const { return children_[child].end; }
  const std::string& output(std::size_t child) const { return children_[child].output; }
  const std::string& last_line(std::size_t child) const { return children_[child].last_line; }

 private:
  struct Child {
    pid_t pid = 0;
    int out = -1;
    int err = -1;
    std::string output;
    std::string line;  // of err, unfinished
    std::string last_line;
    std::optional<ChildEnd> end;
  };

  bool read_output(std::size_t child);
  bool read_lines(std::size_t child);
  void reap();

  OnLine on_line_;
  std::vector<Child> children_;
};

}  // namespace m2n::cli
