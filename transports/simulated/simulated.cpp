// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The transport "simulated": moves nothing. When sessions are prepared the ranks tell one another
/// what they will send, and each simulates the whole round on the cluster of the topology; a
/// round reports the simulated seconds. Messages are as coarse as a program's: all bytes of a pair
/// of ranks in one stage, which wait for the messages that brought what they pass on. Destination
/// memory keeps what it held.

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "core/api/plugins.hpp"
#include "core/api/transport.hpp"
#include "core/plan/simulate.hpp"
#include "core/tensor/view.hpp"

namespace m2n {
namespace {

/// What a rank sends to another in a stage, and the (stage, sender) of messages it waits for.
struct Outgoing {
  std::uint64_t bytes = 0;
  std::set<std::pair<std::uint32_t, Rank>> after;
};
using OutgoingMap = std::map<std::pair<std::uint32_t, Rank>, Outgoing>;  // by stage, receiver

/// Bytes of a buffer that one region touches at its end @p end.
ByteSpan span_of(const Region& region, const Endpoint& end, const Strides& strides, DType dtype) {
  return byte_span(region.copy.extents, {0, end.offset_bytes, strides}, bytes_of(dtype));
}

OutgoingMap outgoing_of(const Program& program) {
  struct Filled {
    std::uint32_t stage;
    Rank from;
    ByteSpan span;
  };
  std::map<std::pair<Role, std::uint32_t>, std::vector<Filled>> filled;
  for (const auto* regions : {&program.receives, &program.copies}) {
    for (const Region& region : *regions) {
      filled[{region.to.role, region.to.buffer}].push_back(
          {region.stage, region.from.rank,
           span_of(region, region.to, region.copy.destination_strides,
                   region.copy.destination_dtype)});
    }
  }
  OutgoingMap outgoing;
  for (const auto* regions : {&program.sends, &program.copies}) {
    for (const Region& region : *regions) {
      Outgoing& out = outgoing[{region.stage, region.to.rank}];
      out.bytes += region.bytes;
      if (region.from.role == Role::source) {
        continue;
      }
      const ByteSpan span =
          span_of(region, region.from, region.copy.source_strides, region.copy.source_dtype);
      for (const Filled& fill : filled[{region.from.role, region.from.buffer}]) {
        if (fill.stage < region.stage && fill.span.begin < span.end && span.begin < fill.span.end) {
          out.after.emplace(fill.stage, fill.from);
        }
      }
    }
  }
  return outgoing;
}

std::string write(const OutgoingMap& outgoing) {
  std::ostringstream text;
  text << outgoing.size();
  for (const auto& [key, out] : outgoing) {
    text << ' ' << key.first << ' ' << key.second << ' ' << out.bytes << ' ' << out.after.size();
    for (const auto& [stage, from] : out.after) {
      text << ' ' << stage << ' ' << from;
    }
  }
  return text.str();
}

OutgoingMap read(const std::string& value) {
  std::istringstream text(value);
  OutgoingMap outgoing;
  std::size_t count = 0;
  text >> count;
  for (std::size_t i = 0; i < count; ++i) {
    std::pair<std::uint32_t, Rank> key;
    std::size_t waits = 0;
    Outgoing out;
    text >> key.first >> key.second >> out.bytes >> waits;
    for (std::size_t w = 0; w < waits; ++w) {
      std::pair<std::uint32_t, Rank> before;
      text >> before.first >> before.second;
      out.after.insert(before);
    }
    outgoing.emplace(key, std::move(out));
  }
  if (!text) {
    throw TransportError(Errc::peer_lost,
                         "simulated: a rank sent a message list that cannot be read");
  }
  return outgoing;
}

std::vector<SimMessage> all_messages(const std::vector<std::string>& of_ranks) {
  std::map<std::tuple<std::uint32_t, Rank, Rank>, Outgoing> all;  // stage, from, to
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    for (auto& [key, out] : read(of_ranks[rank])) {
      all.emplace(std::tuple(key.first, static_cast<Rank>(rank), key.second), std::move(out));
    }
  }
  std::map<std::tuple<std::uint32_t, Rank, Rank>, std::uint32_t> number;
  for (const auto& [key, out] : all) {
    number.emplace(key, static_cast<std::uint32_t>(number.size()));
  }
  std::vector<SimMessage> messages;
  for (const auto& [key, out] : all) {
    const auto& [stage, from, to] = key;
    SimMessage message{from, to, stage, out.bytes, {}};
    for (const auto& [before, sender] : out.after) {
      message.after.push_back(number.at({before, sender, from}));
    }
    messages.push_back(std::move(message));
  }
  return messages;
}

class SimulatedSession final : public Session {
 public:
  SimulatedSession(const Program& program, const Timeline& timeline)
      : report_(expected_report(program, "simulated")) {
    report_.seconds = timeline.seconds;
    std::map<Rank, std::pair<double, double>> times;  // by peer: first start, last end
    for (const TimelineEvent& event : timeline.events) {
      if (event.from == program.rank || event.to == program.rank) {
        const Rank peer = event.from == program.rank ? event.to : event.from;
        const auto [entry, is_new] = times.try_emplace(peer, event.start, event.end);
        entry->second.first = std::min(entry->second.first, event.start);
        entry->second.second = std::max(entry->second.second, event.end);
      }
    }
    for (PeerTraffic& peer : report_.peers) {
      if (const auto found = times.find(peer.peer); found != times.end()) {
        std::tie(peer.start_seconds, peer.end_seconds) = found->second;
      }
    }
  }

  void start(std::uint64_t version, Deadline) override { report_.version = version; }
  RoundReport wait(Deadline) override { return report_; }
  void abort() noexcept override {}

 private:
  RoundReport report_;
};

class SimulatedTransport final : public Transport {
 public:
  explicit SimulatedTransport(std::string topology_file)
      : topology_file_(std::move(topology_file)) {}
  std::string_view name() const noexcept override { return "simulated"; }
  bool moves_bytes() const noexcept override { return false; }

  void connect(Group& group, Deadline deadline) override {
    group_ = &group;
    topology_ = topology_file_.empty() ? Topology::single_island(group.size())
                                       : Topology::read(topology_file_);
    topology_.require(group.size());
    group.barrier("simulated connect", deadline);
  }

  std::unique_ptr<Session> prepare(const Program& program, const Buffers&,
                                   Deadline deadline) override {
    expects(group_ != nullptr, "connect() before prepare()");
    const std::vector<std::string> messages =
        group_->all_gather("simulated prepare", write(outgoing_of(program)), deadline);
    return std::make_unique<SimulatedSession>(program, simulate(all_messages(messages), topology_));
  }

 private:
  std::string topology_file_;
  Topology topology_;
  Group* group_ = nullptr;
};

}  // namespace

void add_transport_simulated(Registries& registries) {
  registries.transports.add(
      "simulated", "moves nothing and reports the time on a described cluster; topology=FILE",
      [](const TransportContext& context) {
        require_known_options("transport 'simulated'", context.options, {"topology"});
        const auto file = context.options.find("topology");
        return std::make_unique<SimulatedTransport>(file == context.options.end() ? ""
                                                                                  : file->second);
      });
}

}  // namespace m2n
