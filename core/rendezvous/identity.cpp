// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/rendezvous/identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

namespace m2n {
namespace {

std::string first_word(const char* file) {
  std::ifstream in(file);
  std::string word;
  in >> word;
  return word;
}

/// Field 22 of /proc/self/stat: with the process number it names a process for good.
std::string start_time() {
  std::ifstream in("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  std::size_t at = text.rfind(')');  // The second field may hold anything, also blanks.
  for (int field = 2; field < 22 && at != std::string::npos; ++field) {
    at = text.find(' ', at + 1);
  }
  return at == std::string::npos ? "" : text.substr(at + 1, text.find(' ', at + 1) - at - 1);
}

/// Which instance of a namespace or file system @p path is.
std::string inode_of(const char* path, bool device) {
  struct stat found {};
  if (::stat(path, &found) != 0) {
    return "none";
  }
  return std::to_string(device ? found.st_dev : found.st_ino);
}

}  // namespace

Peer this_peer() {
  Peer peer;
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) != 0) {
    host[0] = '\0';
  }
  peer.host_name = host[0] != '\0' ? host : "unnamed";
  peer.machine = first_word("/proc/sys/kernel/random/boot_id");
  if (peer.machine.empty()) {
    peer.machine = peer.host_name;
  }
  peer.memory = peer.machine + "/" + inode_of("/dev/shm", true);
  peer.pid = ::getpid();
  // Process numbers repeat in other containers of the machine.
  peer.process = peer.machine + "/" + inode_of("/proc/self/ns/pid", false) + "/" +
                 std::to_string(peer.pid) + "/" + start_time();
  return peer;
}

}  // namespace m2n
