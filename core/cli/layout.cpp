// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// `m2n layout`: who holds what.

#include <boost/json.hpp>
#include <filesystem>
#include <iostream>

#include "core/cli/commands.hpp"
#include "core/cli/job.hpp"
#include "core/error.hpp"

namespace m2n::cli {
namespace {

namespace json = boost::json;

json::array numbers(const Dims& dims) {
  json::array out;
  for (const Index value : dims) {
    out.emplace_back(value);
  }
  return out;
}

json::array pieces_json(const std::vector<Piece>& pieces, const std::vector<std::string>& buffers) {
  json::array out;
  for (const Piece& piece : pieces) {
    json::array box;
    for (std::size_t d = 0; d < piece.box.rank(); ++d) {
      box.push_back(json::array{piece.box.lo[d], piece.box.hi[d]});
    }
    out.push_back(json::object{{"box", std::move(box)},
                               {"buffer", buffers[piece.view.buffer]},
                               {"offset_bytes", piece.view.offset_bytes},
                               {"strides", numbers(piece.view.strides)}});
  }
  return out;
}

/// The compact tensor, and, where the live memory is another, the live pieces as "storage".
void print_line(const Parameter& parameter, Role role, Rank rank) {
  const Side& side = role == Role::source ? parameter.source : parameter.destination;
  const CompactShard shard = side.layout->compact(rank);
  std::vector<Piece> live;
  for (const RankPiece& entry : side.layout->pieces_of(rank)) {
    live.push_back(entry.piece);
  }
  json::object line{{"parameter", parameter.name},
                    {"side", to_string(role)},
                    {"rank", rank},
                    {"dtype", to_string(side.layout->dtype())},
                    {"local_shape", numbers(shard.local_shape)},
                    {"pieces", pieces_json(shard.pieces, {parameter.name})}};
  if (live != shard.pieces || (!live.empty() && side.buffers.front() != parameter.name)) {
    line["storage"] = pieces_json(live, side.buffers);
  }
  std::cout << json::serialize(line) << '\n';
}

}  // namespace

int layout_command(const Arguments& arguments) {
  const Experiment experiment = parse_experiment(arguments);
  if (experiment.problem.empty() && experiment.file.empty() && experiment.model_family.empty() &&
      experiment.model_config.empty()) {
    throw Error(Errc::usage, "layout needs a file: an experiment or a problem file");
  }
  const Job job(experiment);
  for (const Parameter& parameter : job.problem().parameters()) {
    for (const Rank rank : job.problem().source_ranks()) {
      print_line(parameter, Role::source, rank);
    }
    for (const Rank rank : job.problem().destination_ranks()) {
      print_line(parameter, Role::destination, rank);
    }
  }
  return 0;
}

}  // namespace m2n::cli
