// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/process.hpp"

#include <unistd.h>

#include <array>
#include <fstream>

namespace m2n::nccl {

std::string process_space() {
  std::array<char, 64> name{};
  const ssize_t length = readlink("/proc/self/ns/pid", name.data(), name.size());
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  if (length <= 0 || boot.empty()) {
    return "";
  }
  return boot + " " + std::string(name.data(), static_cast<std::size_t>(length));
}

ProcessState process_state(std::uint64_t number, const std::string& space) {
  if (space.empty() || space != process_space()) {
    return ProcessState::unknown;
  }
  std::ifstream file("/proc/" + std::to_string(number) + "/stat");
  std::string text;
  if (!std::getline(file, text)) {
    return ProcessState::ended;
  }
  const std::size_t name_end = text.rfind(')');  // the name before it may hold anything
  const char state =
      name_end != std::string::npos && name_end + 2 < text.size() ? text[name_end + 2] : '?';
  if (state == 'Z' || state == 'X') {
    return ProcessState::ended;
  }
  return state == 'T' || state == 't' ? ProcessState::stopped : ProcessState::running;
}

}  // namespace m2n::nccl
