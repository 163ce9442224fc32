// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/core/rendezvous/child_processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iterator>
#include <stdexcept>

namespace m2n::testing {
namespace {

constexpr int kPatienceMs = 120'000;

void say(int descriptor, std::string line) {
  std::ranges::replace(line, '\n', ' ');
  line += '\n';
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t wrote = ::write(descriptor, line.data() + at, line.size() - at);
    if (wrote < 0) {
      ::_exit(3);
    }
    at += static_cast<std::size_t>(wrote);
  }
}

}  // namespace

ChildProcesses::~ChildProcesses() {
  for (Child& each : children_) {
    if (each.pid > 0) {
      ::kill(each.pid, SIGKILL);
      ::waitpid(each.pid, nullptr, 0);
    }
  }
}

void ChildProcesses::start(Rank rank, const std::function<void(const Report&)>& body) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::runtime_error("no pipe for a child");
  }
  FileDescriptor reading(ends[0]);
  const FileDescriptor writing(ends[1]);
  const pid_t pid = ::fork();
  if (pid < 0) {
    throw std::runtime_error("no child");
  }
  if (pid == 0) {
    ::alarm(4 * kPatienceMs / 1000);  // Should the test itself be killed.
    const Report report = [&](const std::string& line) { say(writing.get(), line); };
    try {
      body(report);
      report("done");
    } catch (const std::exception& error) {
      report(std::string("threw ") + error.what());
    }
    ::_exit(0);
  }
  children_.resize(std::max(children_.size(), static_cast<std::size_t>(rank) + 1));
  child(rank).pid = pid;
  child(rank).lines = std::move(reading);
  child(rank).read.clear();
}

std::string ChildProcesses::line(Rank rank) {
  Child& from = child(rank);
  for (;;) {
    if (const std::size_t end = from.read.find('\n'); end != std::string::npos) {
      std::string line = from.read.substr(0, end);
      from.read.erase(0, end + 1);
      return line;
    }
    pollfd watched{from.lines.get(), POLLIN, 0};
    if (::poll(&watched, 1, kPatienceMs) <= 0) {
      throw std::runtime_error("rank " + std::to_string(rank) + " reports nothing");
    }
    char bytes[4096];
    const ssize_t got = ::read(from.lines.get(), bytes, sizeof bytes);
    if (got <= 0) {
      return "ended";
    }
    from.read.append(bytes, static_cast<std::size_t>(got));
  }
}

void ChildProcesses::send_signal(Rank rank, int signal) {
  if (::kill(child(rank).pid, signal) != 0) {
    throw std::runtime_error("rank " + std::to_string(rank) + " cannot be signalled");
  }
}

int ChildProcesses::wait(Rank rank) {
  int status = 0;
  ::waitpid(child(rank).pid, &status, 0);
  child(rank).pid = -1;
  return status;
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

}  // namespace m2n::testing
