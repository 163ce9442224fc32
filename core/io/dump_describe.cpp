// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <boost/json.hpp>
#include <iomanip>
#include <map>
#include <numeric>
#include <sstream>

#include "core/error.hpp"
#include "core/io/dump.hpp"
#include "core/io/dump_h5.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

/// Facts up to this long are shown; of the others, their size.
constexpr std::size_t kShownBytes = 80;

struct RankShards {
  std::uint64_t tensors = 0;
  std::uint64_t empty = 0;
  std::uint64_t bytes = 0;
};

struct Summary {
  std::uint32_t schema_version = 0;
  std::uint64_t file_bytes = 0;
  std::map<std::string, std::string> facts;
  std::uint64_t parameters = 0;
  std::uint64_t parameter_bytes = 0;
  std::uint64_t layouts = 0;
  bool has_plan = false;
  std::uint64_t regions = 0;
  std::uint64_t pairs = 0;  ///< Of different ranks.
  std::uint64_t moved_bytes = 0;
  std::uint64_t local_bytes = 0;
  std::uint64_t max_egress_bytes = 0;
  std::uint64_t max_ingress_bytes = 0;
  std::uint64_t rounds = 0;
  double slowest_seconds = 0;
  std::map<Role, std::map<Rank, RankShards>> shards;
  std::uint64_t tensors = 0;         ///< Stitched from the destination.
  std::uint64_t source_tensors = 0;  ///< From the source.
};

Summary summarize(const DumpReader& dump) {
  Summary out;
  out.schema_version = dump.schema_version();
  out.file_bytes = std::filesystem::file_size(dump.file());
  out.facts = dump.facts();
  const std::vector<DumpEntry> entries = dump.entries();
  const auto has = [&](const std::string& path) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const DumpEntry& entry) { return entry.path == path; });
  };
  const auto below = [&](const std::string& prefix) {
    return static_cast<std::uint64_t>(
        std::count_if(entries.begin(), entries.end(),
                      [&](const DumpEntry& entry) { return entry.path.starts_with(prefix); }));
  };
  if (has("/params/bytes")) {
    const auto bytes = dump.column<std::uint64_t>("/params/bytes");
    out.parameters = bytes.size();
    out.parameter_bytes = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  }
  if (has("/layouts/begin")) {
    out.layouts = dump.column<std::uint64_t>("/layouts/begin").size();
  }
  if (has("/plan/bytes") && has("/traffic/bytes")) {
    out.has_plan = true;
    const auto source = dump.column<std::int32_t>("/traffic/source");
    const auto destination = dump.column<std::int32_t>("/traffic/destination");
    const auto bytes = dump.column<std::uint64_t>("/traffic/bytes");
    const auto regions = dump.column<std::uint64_t>("/traffic/regions");
    if (destination.size() != source.size() || bytes.size() != source.size() ||
        regions.size() != source.size()) {
      throw Error(Errc::io,
                  "the columns of '/traffic' of '" + dump.file().string() + "' differ in length");
    }
    std::map<Rank, std::uint64_t> egress;
    std::map<Rank, std::uint64_t> ingress;
    for (std::size_t i = 0; i < source.size(); ++i) {
      out.regions += regions[i];
      if (source[i] == destination[i]) {
        out.local_bytes += bytes[i];
        continue;
      }
      ++out.pairs;
      out.moved_bytes += bytes[i];
      out.max_egress_bytes = std::max(out.max_egress_bytes, egress[source[i]] += bytes[i]);
      out.max_ingress_bytes = std::max(out.max_ingress_bytes, ingress[destination[i]] += bytes[i]);
    }
  }
  if (has("/rounds/version")) {
    auto versions = dump.column<std::uint64_t>("/rounds/version");
    std::sort(versions.begin(), versions.end());
    out.rounds = static_cast<std::uint64_t>(
        std::distance(versions.begin(), std::unique(versions.begin(), versions.end())));
    for (const double seconds : dump.column<double>("/rounds/seconds")) {
      out.slowest_seconds = std::max(out.slowest_seconds, seconds);
    }
  }
  for (const Role side : {Role::source, Role::destination}) {
    for (const DumpShard& shard : dump.shards(side)) {
      RankShards& rank = out.shards[side][shard.rank];
      const auto elements = static_cast<std::uint64_t>(element_count(shard.compact.local_shape));
      ++rank.tensors;
      rank.empty += elements == 0 ? 1 : 0;
      rank.bytes += elements * bytes_of(shard.dtype);
    }
  }
  out.tensors = below("/tensors/");
  out.source_tensors = below("/source_tensors/");
  return out;
}

bool is_short(const std::string& text) {
  return text.size() <= kShownBytes && text.find('\n') == std::string::npos;
}

std::string as_json(const Summary& summary, const std::filesystem::path& file) {
  json::object out;
  out["file"] = file.string();
  out["kind"] = "dump";
  out["schema_version"] = summary.schema_version;
  out["file_bytes"] = summary.file_bytes;
  json::object facts;
  for (const auto& [key, text] : summary.facts) {
    facts[key] = text;
  }
  out["experiment"] = std::move(facts);
  out["parameters"] = summary.parameters;
  out["parameter_bytes"] = summary.parameter_bytes;
  out["layouts"] = summary.layouts;
  if (summary.has_plan) {
    out["plan"] = {{"regions", summary.regions},
                   {"messages", summary.pairs},
                   {"bytes", summary.moved_bytes},
                   {"local_bytes", summary.local_bytes},
                   {"max_egress_bytes", summary.max_egress_bytes},
                   {"max_ingress_bytes", summary.max_ingress_bytes}};
  }
  out["rounds"] = summary.rounds;
  out["slowest_seconds"] = summary.slowest_seconds;
  json::array shards;
  for (const auto& [side, ranks] : summary.shards) {
    for (const auto& [rank, held] : ranks) {
      shards.push_back({{"side", to_string(side)},
                        {"rank", rank},
                        {"tensors", held.tensors},
                        {"empty", held.empty},
                        {"bytes", held.bytes}});
    }
  }
  out["shards"] = std::move(shards);
  out["tensors"] = summary.tensors;
  out["source_tensors"] = summary.source_tensors;
  return json::serialize(out) + "\n";
}

/// "1.50 GB": powers of ten, like every rate of this program.
std::string human_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1000 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << value << " " << kUnits[unit];
  return out.str();
}

std::string counted(std::uint64_t count, const std::string& one) {
  return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

std::string as_table(const Summary& summary, const std::filesystem::path& file) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [key, text] : summary.facts) {
    rows.emplace_back(key, is_short(text) ? text : human_bytes(text.size()) + " of text");
  }
  rows.emplace_back("parameters", std::to_string(summary.parameters) + ", " +
                                      human_bytes(summary.parameter_bytes) + ", " +
                                      counted(summary.layouts, "layout"));
  if (summary.has_plan) {
    rows.emplace_back("plan", counted(summary.regions, "region") + ", " +
                                  human_bytes(summary.moved_bytes) + " between " +
                                  counted(summary.pairs, "pair") + " of ranks, " +
                                  human_bytes(summary.local_bytes) + " in place");
    rows.emplace_back("busiest rank", "sends " + human_bytes(summary.max_egress_bytes) +
                                          ", receives " + human_bytes(summary.max_ingress_bytes));
  } else {
    rows.emplace_back("plan", "none");
  }
  std::ostringstream seconds;
  seconds << std::setprecision(3) << summary.slowest_seconds;
  rows.emplace_back("rounds", summary.rounds == 0
                                  ? "none"
                                  : std::to_string(summary.rounds) + ", the slowest took " +
                                        seconds.str() + " s");
  for (const auto& [side, ranks] : summary.shards) {
    for (const auto& [rank, held] : ranks) {
      rows.emplace_back(
          std::string(to_string(side)) + " rank " + std::to_string(rank),
          counted(held.tensors, "shard") + ", " + human_bytes(held.bytes) +
              (held.empty == 0 ? "" : ", " + std::to_string(held.empty) + " of them empty"));
    }
  }
  rows.emplace_back("stitched", counted(summary.tensors, "tensor") + " of the destination, " +
                                    std::to_string(summary.source_tensors) + " of the source");

  std::size_t width = 0;
  for (const auto& row : rows) {
    width = std::max(width, row.first.size());
  }
  std::string out = file.string() + ": dump of m2n, schema " +
                    std::to_string(summary.schema_version) + ", " +
                    human_bytes(summary.file_bytes) + "\n";
  for (const auto& [key, text] : rows) {
    out.append(2, ' ').append(key).append(width - key.size() + 2, ' ').append(text) += '\n';
  }
  return out;
}

}  // namespace

std::string describe_dump(const std::filesystem::path& file, bool json) {
  const DumpReader dump(file);
  const Summary summary = summarize(dump);
  return json ? as_json(summary, file) : as_table(summary, file);
}

}  // namespace m2n
