// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/children.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/error.hpp"

namespace m2n::cli {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(Errc::io, what + ": " + std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
}

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) {
      fail("cannot make a pipe to a child process");
    }
    read = ends[0];
    write = ends[1];
  }
  int read = -1;
  int write = -1;
};

/// In the child: only calls that are safe between fork() and exec().
[[noreturn]] void become(char* const* argv, const std::vector<int>& keep, const Pipe& out,
                         const Pipe& err, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (getppid() == parent && dup2(out.write, STDOUT_FILENO) >= 0 &&
      dup2(err.write, STDERR_FILENO) >= 0) {
    for (const int descriptor : keep) {
      fcntl(descriptor, F_SETFD, 0);
    }
    execv(argv[0], argv);
  }
  _exit(127);
}

}  // namespace

std::string to_string(const ChildEnd& end) {
  return end.signal != 0 ? "was killed by signal " + std::to_string(end.signal)
                         : "ended with status " + std::to_string(end.status);
}

Children::~Children() {
  for (std::size_t i = 0; i < children_.size(); ++i) {
    signal(i, SIGKILL);
  }
  for (Child& child : children_) {
    if (!child.end) {
      waitpid(child.pid, nullptr, 0);
    }
    for (const int descriptor : {child.out, child.err}) {
      if (descriptor >= 0) {
        close(descriptor);
      }
    }
  }
}

std::size_t Children::start(const std::vector<std::string>& words, const std::vector<int>& keep) {
  std::vector<std::string> copies = words;
  std::vector<char*> argv;
  for (std::string& word : copies) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  const Pipe out;
  const Pipe err;
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    become(argv.data(), keep, out, err, parent);
  }
  close(out.write);
  close(err.write);
  if (pid < 0) {
    close(out.read);
    close(err.read);
    fail("cannot start a child process");
  }
  Child child;
  child.pid = pid;
  child.out = out.read;
  child.err = err.read;
  children_.push_back(std::move(child));
  return children_.size() - 1;
}

void Children::signal(std::size_t child, int number) const {
  if (!children_[child].end) {
    kill(children_[child].pid, number);
  }
}

/// @return false at the end of the child's output.
bool Children::read_output(std::size_t child) {
  std::array<char, 4096> buffer{};
  const ssize_t size = read(children_[child].out, buffer.data(), buffer.size());
  if (size > 0) {
    children_[child].output.append(buffer.data(), static_cast<std::size_t>(size));
  }
  return size > 0 || (size < 0 && errno == EINTR);
}

bool Children::read_lines(std::size_t child) {
  std::array<char, 4096> buffer{};
  const ssize_t size = read(children_[child].err, buffer.data(), buffer.size());
  Child& from = children_[child];
  if (size > 0) {
    from.line.append(buffer.data(), static_cast<std::size_t>(size));
  } else if (size == 0 && !from.line.empty()) {
    from.line += '\n';  // its last words
  }
  for (std::size_t end = from.line.find('\n'); end != std::string::npos;
       end = from.line.find('\n')) {
    from.last_line = from.line.substr(0, end);
    from.line.erase(0, end + 1);
    on_line_(child, from.last_line);
  }
  return size > 0 || (size < 0 && errno == EINTR);
}

void Children::reap() {
  for (Child& child : children_) {
    int status = 0;
    // Its output first: the last line tells why.
    if (!child.end && child.err < 0 && waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.end =
          WIFSIGNALED(status) ? ChildEnd{0, WTERMSIG(status)} : ChildEnd{WEXITSTATUS(status), 0};
    }
  }
}

bool Children::run(const std::function<bool()>& done, Deadline deadline) {
  for (;;) {
    reap();
    if (done()) {
      return true;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return false;
    }
    std::vector<pollfd> waits;
    std::vector<std::pair<std::size_t, bool>> which;  // child, and whether its errors
    for (std::size_t i = 0; i < children_.size(); ++i) {
      for (const bool errors : {false, true}) {
        const int descriptor = errors ? children_[i].err : children_[i].out;
        if (descriptor >= 0) {
          waits.push_back({descriptor, POLLIN, 0});
          which.emplace_back(i, errors);
        }
      }
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    // A child that has closed its output ends soon; and done() may depend on a signal.
    poll(waits.data(), waits.size(),
         static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 20)));
    for (std::size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents == 0) {
        continue;
      }
      const auto [child, errors] = which[i];
      if (!(errors ? read_lines(child) : read_output(child))) {
        close(waits[i].fd);
        (errors ? children_[child].err : children_[child].out) = -1;
      }
    }
  }
}

}  // namespace m2n::cli
