// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/transport.hpp"

#include <map>

namespace m2n {

RoundReport expected_report(const Program& program, std::string_view path) {
  std::map<Rank, PeerTraffic> peers;
  for (const Region& region : program.sends) {
    peers[region.to.rank].sent_bytes += region.bytes;
  }
  for (const Region& region : program.receives) {
    peers[region.from.rank].received_bytes += region.bytes;
  }
  RoundReport report;
  for (auto& [peer, traffic] : peers) {
    traffic.peer = peer;
    traffic.path = path;
    report.peers.push_back(traffic);
  }
  for (const Region& region : program.copies) {
    report.copied_bytes += region.bytes;
  }
  return report;
}

}  // namespace m2n
