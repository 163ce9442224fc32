// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/run_program.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "tests/support/temporary_folder.hpp"

namespace m2n::testing {
namespace {

void send_to(const char* file, int descriptor) {
  const int opened = open(file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (opened < 0 || dup2(opened, descriptor) < 0) {
    _exit(127);
  }
}

}  // namespace

Outcome run_program(const std::vector<std::string>& words, const std::filesystem::path& folder) {
  const TemporaryFolder output;
  const std::string out = (output.path() / "out").string();
  const std::string err = (output.path() / "err").string();
  std::vector<char*> argv;
  for (const std::string& word : words) {
    argv.push_back(const_cast<char*>(word.c_str()));
  }
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    throw std::runtime_error("fork failed");
  }
  if (child == 0) {
    send_to(out.c_str(), STDOUT_FILENO);
    send_to(err.c_str(), STDERR_FILENO);
    if (chdir(folder.c_str()) == 0) {
      execv(argv[0], argv.data());
    }
    _exit(127);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) {
    throw std::runtime_error("waitpid failed");
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out),
          read_file(err)};
}

}  // namespace m2n::testing
