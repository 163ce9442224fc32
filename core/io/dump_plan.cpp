// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "core/io/dump_columns.hpp"

namespace m2n {
namespace {

/// A text column of @p table as wide as its longest row. @p text gives row i.
template <class Text>
Column widest_text(const Table& table, const char* name, Text&& text) {
  std::uint64_t longest = 0;
  for (std::size_t i = 0; i < table.rows; ++i) {
    longest = std::max<std::uint64_t>(longest, text(i).size());
  }
  Column column = table.text_column(name, longest);
  for (std::size_t i = 0; i < table.rows; ++i) {
    column.add_text(text(i));
  }
  return column;
}

/// A [rows, width] column of positions, with what a lower rank leaves open padded.
void append_padded(Column& column, std::size_t width, const Dims& dims, Index padding) {
  std::array<Index, kMaxRank> row{};
  std::fill(std::copy(dims.begin(), dims.end(), row.begin()), row.begin() + width, padding);
  column.append(row.data());
}

/// Bytes and regions by pair of ranks.
using Traffic = std::map<std::pair<Rank, Rank>, std::pair<std::uint64_t, std::uint64_t>>;

/// Parameters of one pattern move alike, so their traffic is that of one, times their number.
Traffic traffic_of(const Plan& plan) {
  std::vector<std::uint64_t> users(plan.patterns.size(), 0);
  for (const std::uint32_t number : plan.pattern_of) {
    ++users[number];
  }
  Traffic traffic;
  for (std::size_t i = 0; i < plan.patterns.size(); ++i) {
    const Pattern& pattern = plan.patterns[i];
    for (const Move& move : pattern.moves) {
      auto& [bytes, regions] = traffic[{pattern.rank_of(move.from), pattern.rank_of(move.to)}];
      bytes = checked_add_bytes(bytes, checked_mul_bytes(pattern.move_bytes(move), users[i]));
      regions += users[i];
    }
  }
  std::erase_if(traffic, [](const auto& entry) { return entry.second.second == 0; });
  return traffic;
}

void write_traffic(const Table& pairs, const Traffic& traffic, Rank world_size) {
  {
    const h5::Object group = h5::open_group(pairs.file, pairs.group);
    h5::write_attribute({group, "group '" + pairs.group + "'"}, "world_size", DType::i32, {},
                        &world_size);
  }
  Column source = pairs.column("source", DType::i32);
  Column destination = pairs.column("destination", DType::i32);
  Column bytes = pairs.column("bytes", DType::u64);
  Column regions = pairs.column("regions", DType::u64);
  for (const auto& [ranks, sums] : traffic) {
    source.add(ranks.first);
    destination.add(ranks.second);
    bytes.add(sums.first);
    regions.add(sums.second);
  }
  finish(source, destination, bytes, regions);
}

/// One row a region.
void write_regions(const Table& table, const Plan& plan, std::size_t width) {
  Column parameter = table.column("parameter", DType::u32);
  Column stage = table.column("stage", DType::u32);
  Column source = table.column("source", DType::i32);
  Column destination = table.column("destination", DType::i32);
  Column source_role = table.column("source_role", DType::u8);
  Column destination_role = table.column("destination_role", DType::u8);
  Column source_holding = table.column("source_holding", DType::u32);
  Column destination_holding = table.column("destination_holding", DType::u32);
  Column lo = table.column("lo", DType::i64, width);
  Column hi = table.column("hi", DType::i64, width);
  Column bytes = table.column("bytes", DType::u64);
  for (std::uint32_t i = 0; i < plan.pattern_of.size(); ++i) {
    const Pattern& pattern = plan.patterns[plan.pattern_of[i]];
    for (const Move& move : pattern.moves) {
      const Box& box = pattern.boxes[move.box];
      parameter.add(i);
      stage.add(plan.first_stage[i] + move.stage);
      source.add(pattern.rank_of(move.from));
      destination.add(pattern.rank_of(move.to));
      source_role.add(static_cast<std::uint8_t>(pattern.role_of(move.from)));
      destination_role.add(static_cast<std::uint8_t>(pattern.role_of(move.to)));
      source_holding.add(move.from);
      destination_holding.add(move.to);
      append_padded(lo, width, box.lo, 0);
      append_padded(hi, width, box.hi, 1);
      bytes.add(pattern.move_bytes(move));
    }
  }
  finish(parameter, stage, source, destination, source_role, destination_role, source_holding,
         destination_holding, lo, hi, bytes);
}

std::uint64_t total(const Plan& plan, auto&& list) {
  std::uint64_t sum = 0;
  for (const Pattern& pattern : plan.patterns) {
    sum += (pattern.*list).size();
  }
  return sum;
}

}  // namespace

void DumpWriter::problem(const Problem& problem) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::vector<Parameter>& parameters = problem.parameters();
  const Table table = impl_->table("/params", parameters.size());
  const auto text = [&](const char* column, auto&& of_parameter) {
    widest_text(table, column, [&](std::size_t i) {
      return std::string(of_parameter(parameters[i]));
    }).finish();
  };
  text("name", [](const Parameter& p) { return p.name; });
  text("path", [](const Parameter& p) { return dump_path_of(p.name); });
  text("dtype", [](const Parameter& p) { return to_string(p.source_dtype()); });
  text("destination_dtype", [](const Parameter& p) { return to_string(p.destination_dtype()); });
  text("source_buffers", [](const Parameter& p) { return json_list(p.source.buffers); });
  text("destination_buffers", [](const Parameter& p) { return json_list(p.destination.buffers); });

  Column rank = table.column("rank", DType::u32);
  Column shape = table.column("shape", DType::i64, kMaxRank);
  Column cast = table.column("cast", DType::u8);
  Column bytes = table.column("bytes", DType::u64);
  Column scales = table.column("scales", DType::i64);
  Column blocks = table.column("blocks", DType::i64, kMaxRank);
  Column source_layout = table.column("source_layout", DType::u32);
  Column destination_layout = table.column("destination_layout", DType::u32);
  const std::string digest = problem_digest(problem, impl_->layouts);
  for (std::uint32_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const auto holder = problem.scales_of(i);
    scales.add(holder ? Index{*holder} : Index{-1});
    append_padded(blocks, kMaxRank, holder ? parameter.quantise->blocks : Dims{}, 1);
    rank.add(static_cast<std::uint32_t>(parameter.shape.size()));
    append_padded(shape, kMaxRank, parameter.shape, 1);
    cast.add(static_cast<std::uint8_t>(parameter.cast));
    bytes.add(parameter.bytes());
    source_layout.add(impl_->layouts.number_of(*parameter.source.layout));
    destination_layout.add(impl_->layouts.number_of(*parameter.destination.layout));
  }
  finish(rank, shape, cast, bytes, scales, blocks, source_layout, destination_layout);
  experiment({{"problem_digest", digest}});

  const auto& ranges = impl_->layouts.ranges();
  const Table layouts = impl_->table("/layouts", ranges.size());
  write_text(impl_->file, "/layouts/json", impl_->layouts.json());
  Column begin = layouts.column("begin", DType::u64);
  Column end = layouts.column("end", DType::u64);
  for (const auto& [from, to] : ranges) {
    begin.add(from);
    end.add(to);
  }
  finish(begin, end);
}

void DumpWriter::plan(const Plan& plan, const Problem& problem) {
  const h5::Lock lock;
  impl_->expect_open();
  const std::vector<Parameter>& parameters = problem.parameters();
  if (plan.pattern_of.size() != parameters.size() || plan.first_stage.size() != parameters.size()) {
    throw Error(Errc::bad_plan, "the plan is for " + std::to_string(plan.pattern_of.size()) +
                                    " parameters, and the problem has " +
                                    std::to_string(parameters.size()));
  }
  std::uint64_t rows = 0;
  std::size_t width = 1;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    rows = checked_add_bytes(rows, plan.patterns.at(plan.pattern_of[i]).moves.size(), "regions");
    width = std::max(width, parameters[i].shape.size());
  }
  experiment({{"plan_digest", plan.digest}});
  const Table table = impl_->table("/plan", rows);
  {
    const h5::Object group = h5::open_group(impl_->file, "/plan");
    const h5::Owner owner{group, "group '/plan'"};
    h5::write_attribute(owner, "planner", plan.planner);
    h5::write_attribute(owner, "digest", plan.digest);
    h5::write_attribute(owner, "stages", DType::u32, {}, &plan.stage_count);
  }
  write_regions(table, plan, width);
  impl_->write_patterns(plan, width);
  const Traffic traffic = traffic_of(plan);
  write_traffic(impl_->table("/traffic", traffic.size()), traffic, problem.world_size());
}

void DumpWriter::Impl::write_patterns(const Plan& plan, std::size_t width) {
  const Table of = table("/plan/patterns", plan.pattern_of.size());
  write_text(file, "/plan/patterns/planner", plan.planner);
  Column of_parameter = of.column("of_parameter", DType::u32);
  Column first_stage = of.column("first_stage", DType::u32);
  for (std::size_t i = 0; i < plan.pattern_of.size(); ++i) {
    of_parameter.add(plan.pattern_of[i]);
    first_stage.add(plan.first_stage[i]);
  }
  const Table per_pattern{file, "/plan/patterns", plan.patterns.size(), options.deflate_level};
  Column source_layout = per_pattern.column("source_layout", DType::u32);
  Column destination_layout = per_pattern.column("destination_layout", DType::u32);
  Column box_count = per_pattern.column("box_count", DType::u64);
  Column move_count = per_pattern.column("move_count", DType::u64);
  Column scratch_count = per_pattern.column("scratch_count", DType::u64);

  const Table boxes = table("/plan/patterns/boxes", total(plan, &Pattern::boxes));
  Column box_lo = boxes.column("lo", DType::i64, width);
  Column box_hi = boxes.column("hi", DType::i64, width);
  const Table moves = table("/plan/patterns/moves", total(plan, &Pattern::moves));
  Column box = moves.column("box", DType::u32);
  Column from = moves.column("from", DType::u32);
  Column to = moves.column("to", DType::u32);
  Column stage = moves.column("stage", DType::u32);
  const Table scratch = table("/plan/patterns/scratch", total(plan, &Pattern::scratch));
  Column rank = scratch.column("rank", DType::i32);
  Column scratch_lo = scratch.column("lo", DType::i64, width);
  Column scratch_hi = scratch.column("hi", DType::i64, width);
  Column offset_bytes = scratch.column("offset_bytes", DType::u64);

  const std::size_t known = layouts.ranges().size();
  for (const Pattern& pattern : plan.patterns) {
    source_layout.add(layouts.number_of(*pattern.geometry.source));
    destination_layout.add(layouts.number_of(*pattern.geometry.destination));
    box_count.add(std::uint64_t{pattern.boxes.size()});
    move_count.add(std::uint64_t{pattern.moves.size()});
    scratch_count.add(std::uint64_t{pattern.scratch.size()});
    for (const Box& one : pattern.boxes) {
      append_padded(box_lo, width, one.lo, 0);
      append_padded(box_hi, width, one.hi, 1);
    }
    for (const Move& move : pattern.moves) {
      box.add(move.box);
      from.add(move.from);
      to.add(move.to);
      stage.add(move.stage);
    }
    for (const ScratchPiece& piece : pattern.scratch) {
      rank.add(piece.rank);
      append_padded(scratch_lo, width, piece.box.lo, 0);
      append_padded(scratch_hi, width, piece.box.hi, 1);
      offset_bytes.add(piece.offset_bytes);
    }
  }
  if (layouts.ranges().size() != known) {
    throw Error(Errc::bad_plan,
                "the plan has a pattern of a geometry that no parameter of the problem has; write "
                "the problem that the plan is for, and before it");
  }
  finish(of_parameter, first_stage, source_layout, destination_layout, box_count, move_count,
         scratch_count, box_lo, box_hi, box, from, to, stage, rank, scratch_lo, scratch_hi,
         offset_bytes);
}

}  // namespace m2n
