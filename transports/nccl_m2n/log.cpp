// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl_m2n/log.hpp"

#include <set>
#include <sstream>

namespace m2n::nccl_m2n {
namespace {

constexpr const char* kMark = "[RESHARD]";

/// Empty for a line that names no path.
std::string path_in_line(const std::string& line, std::string_view requested) {
  const auto has = [&](const char* text) { return line.find(text) != std::string::npos; };
  if (has("pack-lsa-hput: ranks=")) {
    return "pack-lsa-hput";
  }
  if (has("split-launch:") || has("split-plan:")) {
    return "pack-split";
  }
  if (has("ncclM2nGroupEnd: count=")) {
    return "grouped-kernel";
  }
  if (has("reshardCopyPack: isSource=")) {
    return "pack-kernel";
  }
  if (has("ncclReshard: copy_algo=")) {
    return std::string(requested) + "-kernel";
  }
  return "";
}

}  // namespace

std::string path_in_log(const std::string& log, int rank, std::string_view requested) {
  const std::string mine = "[Rank " + std::to_string(rank) + "]";
  std::set<std::string> paths;
  std::istringstream in(log);
  for (std::string line; std::getline(in, line);) {
    if (line.find(kMark) != std::string::npos && line.find(mine) != std::string::npos) {
      if (const std::string path = path_in_line(line, requested); !path.empty()) {
        paths.insert(path);
      }
    }
  }
  if (paths.contains("pack-lsa-hput")) {  // what follows it in the log is shared with the kernel
    paths.erase("pack-kernel");
  }
  std::string text;
  for (const std::string& path : paths) {
    text += (text.empty() ? "" : "+") + path;
  }
  return text.empty() ? "not logged" : text;
}

std::string lines_of_others(const std::string& output) {
  std::string text;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    if (line.find(kMark) == std::string::npos) {
      text += line;
      if (!in.eof()) {
        text += '\n';
      }
    }
  }
  return text;
}

}  // namespace m2n::nccl_m2n
