// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/cli/explain.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <cctype>
#include <map>
#include <utility>

#include "core/cli/output.hpp"
#include "core/engine/round.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

std::uint64_t bytes_on(const Layout& layout, Rank rank) {
  std::uint64_t elements = 0;
  for (const RankPiece& held : layout.pieces_of(rank)) {
    elements = checked_add_bytes(elements, static_cast<std::uint64_t>(held.piece.box.volume()),
                                 "bytes of a worker");
  }
  return checked_mul_bytes(elements, bytes_of(layout.dtype()), "bytes of a worker");
}

/// "layers.0.experts.17" to "layers.*.experts.*".
std::string without_numbers(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool digit = std::isdigit(static_cast<unsigned char>(text[i])) != 0;
    const bool starts = i == 0 || text[i - 1] == '.';
    if (!digit || !(starts || result.back() == '*')) {
      result += text[i];
    } else if (starts) {
      result += '*';
    }
  }
  return result;
}

/// "whole on 8 workers", "2 boxes on 4 of 8 workers, the first [0:4, 0:8]".
std::string places_text(const Layout& layout) {
  std::size_t holders = 0;
  std::size_t most = 0;
  for (const Rank rank : layout.ranks()) {
    const std::size_t pieces = layout.pieces_of(rank).size();
    holders += pieces > 0 ? 1 : 0;
    most = std::max(most, pieces);
  }
  if (holders == 0) {
    return "nowhere";
  }
  const Box& first = layout.pieces().front().piece.box;
  const std::string who =
      " on " + std::to_string(holders) +
      (holders == layout.ranks().size() ? "" : " of " + std::to_string(layout.ranks().size())) +
      " workers";
  if (most == 1 && first == Box::whole(layout.shape())) {
    return "whole" + who;
  }
  return (most == 1 ? std::string("a box") : std::to_string(most) + " boxes") + who +
         ", the first " + to_string(first);
}

bool unused(const Parameter& parameter) {
  return parameter.destination.layout->pieces().empty() && element_count(parameter.shape) > 0;
}

std::string dtype_text(const Parameter& parameter) {
  const std::string from(to_string(parameter.source_dtype()));
  const std::string to(to_string(parameter.destination_dtype()));
  return from == to ? from : from + " to " + to;
}

}  // namespace

std::uint64_t Coverage::max_received_bytes() const {
  return received_bytes.empty() ? 0
                                : *std::max_element(received_bytes.begin(), received_bytes.end());
}

std::string Coverage::text() const {
  const double share =
      bytes == 0 ? 100 : 100 * static_cast<double>(direct_bytes) / static_cast<double>(bytes);
  return std::to_string(direct_tensors) + " of " + std::to_string(tensors) + " tensors, " +
         fixed(share, 1) + " % of " + human_bytes(bytes) + " in place" +
         (unused_tensors == 0 ? ""
                              : "; " + std::to_string(unused_tensors) + " more are not needed");
}

json::object Coverage::json() const {
  return {{"unused_tensors", unused_tensors},
          {"tensors", tensors},
          {"direct_tensors", direct_tensors},
          {"bytes", bytes},
          {"direct_bytes", direct_bytes},
          {"received_bytes", json::value_from(received_bytes)},
          {"received_full_bytes", json::value_from(received_full_bytes)},
          {"largest_group_bytes", largest_group_bytes}};
}

Coverage coverage_of(const Job& job) {
  const Problem& problem = job.problem();
  const std::vector<Rank>& workers = problem.destination_ranks();
  Coverage coverage;
  coverage.received_bytes.resize(workers.size());
  coverage.received_full_bytes.resize(workers.size());
  for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
    const Parameter& parameter = problem.parameters()[i];
    const bool direct = job.resolutions()[i].mode == Mode::direct;
    if (unused(parameter)) {
      ++coverage.unused_tensors;
      continue;
    }
    ++coverage.tensors;
    coverage.bytes = checked_add_bytes(coverage.bytes, parameter.bytes());
    coverage.direct_tensors += direct ? 1 : 0;
    coverage.direct_bytes += direct ? parameter.bytes() : 0;
    for (std::size_t w = 0; w < workers.size(); ++w) {
      const std::uint64_t bytes = bytes_on(*parameter.destination.layout, workers[w]);
      coverage.received_bytes[w] = checked_add_bytes(coverage.received_bytes[w], bytes);
      coverage.received_full_bytes[w] += direct ? 0 : bytes;
    }
  }
  coverage.largest_group_bytes =
      round_groups(problem, job.resolutions(), job.experiment().pool_bytes).largest_bytes();
  return coverage;
}

std::string explain_text(const Job& job) {
  struct Line {
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;
    std::string shape;
    std::string places;
  };
  // Mode, dtype and reason tell rows of one name apart.
  std::map<std::vector<std::string>, std::size_t> numbers;
  std::vector<std::pair<std::vector<std::string>, Line>> lines;
  const auto& parameters = job.problem().parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const Resolution& resolution = job.resolutions()[i];
    const std::string mode =
        unused(parameter) ? std::string("unused") : std::string(to_string(resolution.mode));
    std::vector<std::string> key = {without_numbers(parameter.name), mode, dtype_text(parameter),
                                    without_numbers(resolution.reason)};
    const auto [at, fresh] = numbers.emplace(key, lines.size());
    if (fresh) {
      lines.emplace_back(std::move(key), Line{0, 0, to_string(parameter.shape),
                                              places_text(*resolution.side.layout)});
    }
    Line& line = lines[at->second].second;
    ++line.count;
    line.bytes += parameter.bytes();
  }
  Table table({"tensor", "count", "bytes", "mode", "dtype", "shape", "workers", "reason"});
  for (const auto& [key, line] : lines) {
    table.add({key[0], std::to_string(line.count), human_bytes(line.bytes), key[1], key[2],
               line.shape, line.places, key[3]});
  }
  const Coverage coverage = coverage_of(job);
  Table facts({"coverage", coverage.text()}, true);
  facts.add({"a worker receives", "at most " + human_bytes(coverage.max_received_bytes())});
  facts.add({"full tensors at a time", human_bytes(coverage.largest_group_bytes)});
  return table.text() + "\n" + facts.text();
}

json::object explain_json(const Job& job) {
  json::array tensors;
  const auto& parameters = job.problem().parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const Resolution& resolution = job.resolutions()[i];
    json::array received;
    for (const Rank worker : job.problem().destination_ranks()) {
      received.emplace_back(bytes_on(*resolution.side.layout, worker));
    }
    tensors.push_back(json::object{{"name", parameter.name},
                                   {"shape", json::value_from(std::vector<Index>(
                                                 parameter.shape.begin(), parameter.shape.end()))},
                                   {"mode", to_string(resolution.mode)},
                                   {"from_dtype", to_string(parameter.source_dtype())},
                                   {"to_dtype", to_string(parameter.destination_dtype())},
                                   {"received_bytes", std::move(received)},
                                   {"reason", resolution.reason}});
  }
  return {{"coverage", coverage_of(job).json()}, {"tensors", std::move(tensors)}};
}

}  // namespace m2n::cli
