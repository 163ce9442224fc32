// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"

namespace m2n {

void DumpWriter::round(Rank rank, const RoundReport& report) {
  const h5::Lock lock;
  impl_->expect_open();
  impl_->rounds.emplace_back(rank, report);
}

void DumpWriter::timeline(const Timeline& timeline) {
  const h5::Lock lock;
  impl_->expect_open();
  const Table events = impl_->table("/simulation", timeline.events.size());
  {
    const h5::Object group = h5::open_group(impl_->file, "/simulation");
    h5::write_attribute({group, "group '/simulation'"}, "seconds", DType::f64, {},
                        &timeline.seconds);
  }
  Column start = events.column("start", DType::f64);
  Column end = events.column("end", DType::f64);
  Column source = events.column("source", DType::i32);
  Column destination = events.column("destination", DType::i32);
  Column stage = events.column("stage", DType::u32);
  Column bytes = events.column("bytes", DType::u64);
  for (const TimelineEvent& event : timeline.events) {
    start.add(event.start);
    end.add(event.end);
    source.add(event.from);
    destination.add(event.to);
    stage.add(event.stage);
    bytes.add(event.bytes);
  }
  finish(start, end, source, destination, stage, bytes);

  const Table ports = impl_->table("/simulation/ports", timeline.ports.size());
  std::uint64_t longest = 0;
  for (const Timeline::Port& port : timeline.ports) {
    longest = std::max<std::uint64_t>(longest, port.name.size());
  }
  Column name(impl_->file, "/simulation/ports/name", h5::text_type(longest), timeline.ports.size(),
              0, impl_->options.deflate_level);
  Column port_bytes = ports.column("bytes", DType::u64);
  Column busy = ports.column("busy", DType::f64);
  for (const Timeline::Port& port : timeline.ports) {
    name.add_text(port.name);
    port_bytes.add(port.bytes);
    busy.add(port.busy);
  }
  finish(name, port_bytes, busy);
}

void DumpWriter::results(const std::string& name, const std::vector<DumpColumn>& columns) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::string group = "/results/" + dump_path_of(name);
  h5::create_group(impl_->file, group);
  std::optional<std::size_t> rows;
  for (const DumpColumn& column : columns) {
    std::visit(
        [&](const auto& values) {
          using Value = typename std::decay_t<decltype(values)>::value_type;
          if (rows.value_or(values.size()) != values.size()) {
            throw Error(Errc::bad_argument, "column '" + column.name + "' of '" + group + "' has " +
                                                std::to_string(values.size()) + " rows, not " +
                                                std::to_string(*rows));
          }
          rows = values.size();
          const std::string path = group + "/" + dump_path_of(column.name);
          h5::Type type = h5::type_of(std::is_same_v<Value, double> ? DType::f64 : DType::u64);
          if constexpr (std::is_same_v<Value, std::string>) {
            std::uint64_t longest = 0;
            for (const std::string& text : values) {
              longest = std::max<std::uint64_t>(longest, text.size());
            }
            type = h5::text_type(longest);
          }
          Column out(impl_->file, path, std::move(type), values.size(), 0,
                     impl_->options.deflate_level);
          for (const Value& value : values) {
            if constexpr (std::is_same_v<Value, std::string>) {
              out.add_text(value);
            } else {
              out.add(value);
            }
          }
          out.finish();
        },
        column.rows);
  }
}

void DumpWriter::Impl::write_rounds() {
  std::uint64_t peer_rows = 0;
  std::uint64_t longest_path = 0;
  std::map<std::string, std::uint32_t> numbers;
  std::vector<std::string_view> names;
  for (const auto& [rank, report] : rounds) {
    peer_rows += report.peers.size();
    for (const PeerTraffic& peer : report.peers) {
      const auto [entry, is_new] =
          numbers.try_emplace(peer.path, static_cast<std::uint32_t>(names.size()));
      if (is_new) {
        names.push_back(entry->first);
        longest_path = std::max<std::uint64_t>(longest_path, entry->first.size());
      }
    }
  }

  const Table per_rank = table("/rounds", rounds.size());
  Column version = per_rank.column("version", DType::u64);
  Column rank = per_rank.column("rank", DType::i32);
  Column seconds = per_rank.column("seconds", DType::f64);
  Column copied_bytes = per_rank.column("copied_bytes", DType::u64);
  const Table per_peer = table("/rounds/peers", peer_rows);
  Column peer_version = per_peer.column("version", DType::u64);
  Column peer_rank = per_peer.column("rank", DType::i32);
  Column peer = per_peer.column("peer", DType::i32);
  Column sent_bytes = per_peer.column("sent_bytes", DType::u64);
  Column received_bytes = per_peer.column("received_bytes", DType::u64);
  Column path = per_peer.column("path", DType::u32);
  Column start = per_peer.column("start", DType::f64);
  Column end = per_peer.column("end", DType::f64);
  for (const auto& [of, report] : rounds) {
    version.add(report.version);
    rank.add(of);
    seconds.add(report.seconds);
    copied_bytes.add(report.copied_bytes);
    for (const PeerTraffic& traffic : report.peers) {
      peer_version.add(report.version);
      peer_rank.add(of);
      peer.add(traffic.peer);
      sent_bytes.add(traffic.sent_bytes);
      received_bytes.add(traffic.received_bytes);
      path.add(numbers.at(traffic.path));
      start.add(traffic.start_seconds);
      end.add(traffic.end_seconds);
    }
  }
  finish(version, rank, seconds, copied_bytes, peer_version, peer_rank, peer, sent_bytes,
         received_bytes, path, start, end);

  Column paths(file, "/rounds/peers/paths", h5::text_type(longest_path), names.size(), 0,
               options.deflate_level);
  for (const std::string_view name : names) {
    paths.add_text(name);
  }
  paths.finish();
}

void DumpWriter::phase(const DumpPhase& phase) {
  const h5::Lock lock;
  impl_->expect_open();
  impl_->phases.push_back(phase);
}

void DumpWriter::digest(const DumpDigest& digest) {
  const h5::Lock lock;
  impl_->expect_open();
  expects(digest.side != Role::scratch, "a side: source or destination");
  impl_->digests.push_back(digest);
}

void DumpWriter::Impl::write_phases() {
  std::uint64_t longest = 0;
  for (const DumpPhase& phase : phases) {
    longest = std::max<std::uint64_t>(longest, phase.name.size());
  }
  const Table per_phase = table("/phases", phases.size());
  Column name = per_phase.text_column("name", longest);
  Column rank = per_phase.column("rank", DType::i32);
  Column version = per_phase.column("version", DType::u64);
  Column start = per_phase.column("start", DType::f64);
  Column end = per_phase.column("end", DType::f64);
  for (const DumpPhase& phase : phases) {
    name.add_text(phase.name);
    rank.add(phase.rank);
    version.add(phase.version);
    start.add(phase.start_seconds);
    end.add(phase.end_seconds);
  }
  finish(name, rank, version, start, end);
}

void DumpWriter::Impl::write_digests() {
  std::sort(digests.begin(), digests.end());  // threads came in any order
  const Table per_digest = table("/digests", digests.size());
  Column side = per_digest.column("side", DType::u8);
  Column rank = per_digest.column("rank", DType::i32);
  Column parameter = per_digest.column("parameter", DType::u32);
  Column digest = per_digest.column("digest", DType::u64);
  for (const DumpDigest& row : digests) {
    side.add(static_cast<std::uint8_t>(row.side));
    rank.add(row.rank);
    parameter.add(row.parameter);
    digest.add(row.digest);
  }
  finish(side, rank, parameter, digest);
}

}  // namespace m2n
