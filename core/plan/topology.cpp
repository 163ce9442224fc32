// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/topology.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "core/io/json_reader.hpp"

namespace m2n {
namespace {

namespace json = boost::json;

constexpr double kBytesPerGb = 1e9;

/// A set of ranks, sorted. Fails when a rank stands twice or there is none.
std::vector<Rank> ranks_of(const JsonReader& value, const char* when_empty) {
  std::vector<Rank> ranks;
  for (const JsonReader& entry : value.items()) {
    ranks.push_back(entry.integer_in<Rank>());
  }
  if (ranks.empty()) {
    value.fail(when_empty);
  }
  std::sort(ranks.begin(), ranks.end());
  const auto twice = std::adjacent_find(ranks.begin(), ranks.end());
  if (twice != ranks.end()) {
    value.fail("has rank " + std::to_string(*twice) + " twice");
  }
  return ranks;
}

double rate_of(const JsonReader& value) {
  const double rate = value.number();
  if (!(rate > 0) || !std::isfinite(rate)) {
    value.fail("must be a rate above 0, in 10^9 bytes a second");
  }
  return rate;
}

/// The rate that is never exceeded: given under @p key, or @p practical.
double nominal_of(const JsonReader& object, const char* key, double practical) {
  const auto value = object.find(key);
  if (!value) {
    return practical;
  }
  const double nominal = rate_of(*value);
  if (nominal < practical) {
    value->fail("must not be below the rate achieved in practice");
  }
  return nominal;
}

Nic nic_of(const JsonReader& value) {
  value.allow_keys({"ranks", "gb_per_s", "nominal_gb_per_s"});
  Nic nic;
  nic.ranks = ranks_of(value.at("ranks"), "is empty: a NIC must serve at least one rank");
  nic.gb_per_s = rate_of(value.at("gb_per_s"));
  nic.nominal_gb_per_s = nominal_of(value, "nominal_gb_per_s", nic.gb_per_s);
  return nic;
}

Uplink uplink_of(const JsonReader& value) {
  value.allow_keys({"name", "ranks", "gb_per_s"});
  Uplink uplink;
  uplink.name = std::string(value.at("name").string());
  uplink.ranks = ranks_of(value.at("ranks"), "is empty: an uplink must serve at least one rank");
  uplink.gb_per_s = rate_of(value.at("gb_per_s"));
  return uplink;
}

/// Which of @p sets each rank is in. Fails for a rank in two.
template <class Set, class RanksOf>
std::map<Rank, std::size_t> membership(const std::vector<Set>& sets, RanksOf ranks_of_set,
                                       const char* what, const JsonReader& at) {
  std::map<Rank, std::size_t> member;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    for (const Rank rank : ranks_of_set(sets[i])) {
      const auto [entry, added] = member.emplace(rank, i);
      if (!added) {
        at.fail("has rank " + std::to_string(rank) + " in " + what + " " +
                std::to_string(entry->second) + " and in " + what + " " + std::to_string(i) +
                "; a rank is in one");
      }
    }
  }
  return member;
}

void require_inside(const std::vector<Rank>& ranks, const std::map<Rank, std::size_t>& island_of,
                    const std::string& what, const JsonReader& document) {
  for (const Rank rank : ranks) {
    if (!island_of.contains(rank)) {
      document.fail(what + " serves rank " + std::to_string(rank) +
                    ", which is in no island; name each rank in one island");
    }
  }
}

json::array json_ranks(const std::vector<Rank>& ranks) {
  json::array out;
  for (const Rank rank : ranks) {
    out.emplace_back(rank);
  }
  return out;
}

/// "0-3" or "0,2,5".
std::string span_text(const std::vector<Rank>& ranks) {
  if (ranks.size() > 1 && ranks.back() - ranks.front() + 1 == static_cast<Rank>(ranks.size())) {
    return "s " + std::to_string(ranks.front()) + "-" + std::to_string(ranks.back());
  }
  std::string text = ranks.size() == 1 ? " " : "s ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

Topology Topology::single_island(Rank world_size, double link_gb_per_s, double latency_us) {
  expects(world_size >= 1, "a world of at least one rank");
  expects(link_gb_per_s > 0 && std::isfinite(link_gb_per_s), "a link rate above 0");
  expects(latency_us >= 0 && std::isfinite(latency_us), "a latency of at least 0");
  Topology topology;
  topology.islands.emplace_back();
  for (Rank rank = 0; rank < world_size; ++rank) {
    topology.islands.front().push_back(rank);
  }
  topology.link_gb_per_s = link_gb_per_s;
  topology.link_nominal_gb_per_s = link_gb_per_s;
  topology.latency_us = latency_us;
  return topology;
}

Topology Topology::read(const std::filesystem::path& file) {
  return parse(read_text_file(file), file.string());
}

Topology Topology::parse(std::string_view text, const std::string& where) {
  const json::value value = parse_json(text, where);
  const JsonReader document(value, where);
  document.allow_keys({"islands", "latency_us", "link_gb_per_s", "link_nominal_gb_per_s",
                       "memory_gb_per_s", "nics", "uplinks"});
  Topology topology;
  for (const JsonReader& island : document.at("islands").items()) {
    island.allow_keys({"ranks"});
    topology.islands.push_back(ranks_of(island.at("ranks"), "is empty: an island holds ranks"));
  }
  const JsonReader islands = document.at("islands");
  if (topology.islands.empty()) {
    islands.fail("is empty; name at least one island");
  }
  topology.link_gb_per_s = rate_of(document.at("link_gb_per_s"));
  topology.link_nominal_gb_per_s =
      nominal_of(document, "link_nominal_gb_per_s", topology.link_gb_per_s);
  if (const auto memory = document.find("memory_gb_per_s")) {
    topology.memory_gb_per_s = rate_of(*memory);
  }
  if (const auto latency = document.find("latency_us")) {
    topology.latency_us = latency->number();
    if (!(topology.latency_us >= 0) || !std::isfinite(topology.latency_us)) {
      latency->fail("must be at least 0 microseconds");
    }
  }
  const auto island_of = membership(
      topology.islands, [](const auto& ranks) -> const auto& { return ranks; }, "island", islands);
  Rank expected = 0;
  for (const auto& [rank, island] : island_of) {
    if (rank != expected) {
      islands.fail("has no rank " + std::to_string(expected) + " but a rank " +
                   std::to_string(rank) + "; each rank is in one island");
    }
    ++expected;
  }
  std::map<Rank, std::size_t> nic_of_rank;
  if (const auto nics = document.find("nics")) {
    for (const JsonReader& nic : nics->items()) {
      topology.nics.push_back(nic_of(nic));
      require_inside(topology.nics.back().ranks, island_of,
                     "NIC " + std::to_string(topology.nics.size() - 1), *nics);
    }
    nic_of_rank = membership(
        topology.nics, [](const Nic& nic) -> const auto& { return nic.ranks; }, "NIC", *nics);
  }
  if (topology.islands.size() > 1) {
    for (const auto& [rank, island] : island_of) {
      if (!nic_of_rank.contains(rank)) {
        document.fail("has " + std::to_string(topology.islands.size()) +
                      " islands, but no NIC serves rank " + std::to_string(rank) +
                      "; between islands each rank needs one");
      }
    }
  }
  if (const auto uplinks = document.find("uplinks")) {
    for (const JsonReader& uplink : uplinks->items()) {
      topology.uplinks.push_back(uplink_of(uplink));
      require_inside(topology.uplinks.back().ranks, island_of,
                     "uplink '" + topology.uplinks.back().name + "'", *uplinks);
    }
  }
  return topology;
}

std::string Topology::canonical_json() const {
  json::object document;
  json::array island_list;
  for (const auto& ranks : islands) {
    island_list.push_back(json::object{{"ranks", json_ranks(ranks)}});
  }
  document["islands"] = std::move(island_list);
  document["latency_us"] = latency_us;
  document["link_gb_per_s"] = link_gb_per_s;
  document["link_nominal_gb_per_s"] = link_nominal_gb_per_s;
  if (memory_gb_per_s > 0) {
    document["memory_gb_per_s"] = memory_gb_per_s;
  }
  json::array nic_list;
  for (const Nic& nic : nics) {
    nic_list.push_back(json::object{{"gb_per_s", nic.gb_per_s},
                                    {"nominal_gb_per_s", nic.nominal_gb_per_s},
                                    {"ranks", json_ranks(nic.ranks)}});
  }
  document["nics"] = std::move(nic_list);
  json::array uplink_list;
  for (const Uplink& uplink : uplinks) {
    uplink_list.push_back(json::object{
        {"gb_per_s", uplink.gb_per_s}, {"name", uplink.name}, {"ranks", json_ranks(uplink.ranks)}});
  }
  document["uplinks"] = std::move(uplink_list);
  return json::serialize(document);
}

void Topology::require(Rank world_size) const {
  if (rank_count() >= world_size) {
    return;
  }
  throw Error(Errc::bad_argument, "the topology has " + std::to_string(rank_count()) +
                                      " ranks, so rank " + std::to_string(rank_count()) +
                                      " is in no island; the problem needs " +
                                      std::to_string(world_size) + " ranks");
}

Rank Topology::rank_count() const {
  Rank count = 0;
  for (const auto& ranks : islands) {
    count += static_cast<Rank>(ranks.size());
  }
  return count;
}

Ports::Ports(const Topology& topology)
    : islands_(static_cast<std::uint32_t>(topology.islands.size())) {
  const auto ranks = static_cast<std::size_t>(topology.rank_count());
  const auto add = [&](Kind kind, double rate, double nominal) {
    rate_.insert(rate_.end(), 2, rate * kBytesPerGb);
    nominal_.insert(nominal_.end(), 2, nominal * kBytesPerGb);
    kind_.insert(kind_.end(), 2, kind);
  };
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    add(Kind::link, topology.link_gb_per_s, topology.link_nominal_gb_per_s);
  }
  island_of_.assign(ranks, 0);
  for (std::uint32_t island = 0; island < islands_; ++island) {
    for (const Rank rank : topology.islands[island]) {
      island_of_.at(static_cast<std::size_t>(rank)) = island;
    }
  }
  nic_of_.assign(ranks, kNone);
  for (const Nic& nic : topology.nics) {
    for (const Rank rank : nic.ranks) {
      nic_of_.at(static_cast<std::size_t>(rank)) = size();
    }
    add(Kind::nic, nic.gb_per_s, nic.nominal_gb_per_s);
    shared_names_.push_back("NIC of rank" + span_text(nic.ranks));
  }
  first_uplink_ = size();
  for (const Uplink& uplink : topology.uplinks) {
    add(Kind::uplink, uplink.gb_per_s, uplink.gb_per_s);
    shared_names_.push_back("uplink '" + uplink.name + "'");
    std::vector<bool> members(ranks, false);
    for (const Rank rank : uplink.ranks) {
      members.at(static_cast<std::size_t>(rank)) = true;
    }
    uplink_members_.push_back(std::move(members));
  }
}

std::string Ports::name(std::uint32_t port) const {
  const std::uint32_t pair = port / 2;
  const auto ranks = static_cast<std::uint32_t>(island_of_.size());
  const std::string text =
      pair < ranks ? "rank " + std::to_string(pair) : shared_names_[pair - ranks];
  return text + (outgoing(port) ? " egress" : " ingress");
}

void Ports::path(Rank from, Rank to, std::vector<std::uint32_t>& out) const {
  if (from == to) {
    return;
  }
  if (island_of(from) == island_of(to)) {
    out.push_back(link_out(from));
    out.push_back(link_in(to));
    return;
  }
  out.push_back(nic_out(from));
  out.push_back(nic_in(to));
  for (std::size_t i = 0; i < uplink_members_.size(); ++i) {
    const bool has_from = uplink_members_[i][static_cast<std::size_t>(from)];
    const bool has_to = uplink_members_[i][static_cast<std::size_t>(to)];
    if (has_from != has_to) {
      out.push_back(first_uplink_ + 2 * static_cast<std::uint32_t>(i) + (has_from ? 0U : 1U));
    }
  }
}

}  // namespace m2n
