// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/tables.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "core/error.hpp"

namespace m2n::nccl {

Convert convert_of(DType from, DType to) {
  if (from == to) {
    return Convert::none;
  }
  if (from == DType::f32 && to == DType::bf16) {
    return Convert::f32_to_bf16;
  }
  if (from == DType::f32 && to == DType::f16) {
    return Convert::f32_to_f16;
  }
  if (from == DType::bf16 && to == DType::f32) {
    return Convert::bf16_to_f32;
  }
  if (from == DType::bf16 && to == DType::f16) {
    return Convert::bf16_to_f16;
  }
  if (from == DType::f16 && to == DType::f32) {
    return Convert::f16_to_f32;
  }
  if (from == DType::f16 && to == DType::bf16) {
    return Convert::f16_to_bf16;
  }
  if (can_quantise(from, to)) {
    return from == DType::f32    ? Convert::f32_to_f8
           : from == DType::bf16 ? Convert::bf16_to_f8
                                 : Convert::f16_to_f8;
  }
  throw Error(Errc::bad_argument, "no cast from " + std::string(to_string(from)) + " to " +
                                      std::string(to_string(to)) +
                                      " in a move, expected equal types or two of f16, bf16 and "
                                      "f32");
}

namespace {

constexpr std::uint64_t kSegment = 16;
constexpr std::int64_t kScaleBytes = sizeof(float);

/// The contiguous row that both sides share, in elements under one scale, and how many dimensions
/// it takes (0 or 1: regions are simplified).
std::size_t row_dimensions(const StridedCopy& copy) {
  const std::size_t rank = copy.extents.size();
  return rank > 0 && copy.source_strides[rank - 1] == 1 &&
                 copy.destination_strides[rank - 1] == 1 &&
                 (!copy.quantises() || copy.scale_strides[rank - 1] == 0)
             ? 1
             : 0;
}

std::uint64_t magnitude(std::int64_t step) {
  const auto bits = static_cast<std::uint64_t>(step);
  return step < 0 ? 0 - bits : bits;
}

/// Segments that a row of @p bytes can touch when it may start anywhere a multiple of @p step
/// apart.
std::uint64_t segments_of(std::uint64_t destination, std::uint64_t bytes, std::uint64_t steps) {
  if (steps % kSegment == 0) {
    return (destination % kSegment + bytes + kSegment - 1) / kSegment;
  }
  if (bytes <= 8 && (bytes & (bytes - 1)) == 0 && (destination | steps) % bytes == 0) {
    return 1;  // an aligned item never crosses a segment
  }
  return (bytes + kSegment - 2) / kSegment + 1;
}

}  // namespace

std::uint64_t Placed::bytes() const {
  return static_cast<std::uint64_t>(element_count(copy.extents)) * copy.destination_item_bytes();
}

ListSlice append_list(std::span<const Placed> regions, Tables& tables) {
  ListSlice slice{tables.tasks.size(), 0, 0};
  for (const Placed& region : regions) {
    const StridedCopy& copy = region.copy;
    if (region.bytes() == 0) {
      continue;
    }
    Task task{.source = region.source, .destination = region.destination};
    task.convert = convert_of(copy.source_dtype, copy.destination_dtype);
    task.scales = region.scales;
    slice.quantises = slice.quantises || copy.quantises();
    const auto source_item = static_cast<std::int64_t>(copy.source_item_bytes());
    const auto item = static_cast<std::int64_t>(copy.destination_item_bytes());
    const std::size_t inner = row_dimensions(copy);
    const std::size_t outer = copy.extents.size() - inner;
    const auto row = static_cast<std::uint64_t>(inner == 1 ? copy.extents[outer] : 1);
    task.row_bytes = row * static_cast<std::uint64_t>(item);
    task.rows = region.bytes() / task.row_bytes;
    if (tables.loops.size() + outer > UINT32_MAX) {
      throw Error(Errc::bad_argument, "a program of more than 2^32 loops, expected fewer regions");
    }
    task.first_loop = static_cast<std::uint32_t>(tables.loops.size());
    task.loop_count = static_cast<std::uint16_t>(outer);
    std::uint64_t steps = 0;
    for (std::size_t d = outer; d-- > 0;) {
      const Loop loop{static_cast<std::uint64_t>(copy.extents[d]),
                      copy.source_strides[d] * source_item, copy.destination_strides[d] * item,
                      copy.quantises() ? copy.scale_strides[d] * kScaleBytes : 0};
      steps |= magnitude(loop.destination_step);
      tables.loops.push_back(loop);
    }
    const std::uint64_t unit = copy.quantises() ? kQuantiseUnit : kCastUnit;
    task.row_units = task.convert == Convert::none
                         ? segments_of(task.destination, task.row_bytes, steps)
                         : (row + unit - 1) / unit;
    task.first_tile = slice.tiles;
    const std::uint64_t units = checked_mul_bytes(task.rows, task.row_units);
    slice.tiles += units / kTileUnits + (units % kTileUnits != 0 ? 1 : 0);
    tables.tasks.push_back(task);
  }
  slice.count = tables.tasks.size() - slice.begin;
  return slice;
}

namespace {

/// Bytes of a region that is one run on both sides without a cast; otherwise nothing.
std::optional<std::uint64_t> run_bytes(const Placed& region) {
  const StridedCopy& copy = region.copy;
  const bool plain =
      copy.source_dtype == copy.destination_dtype &&
      (copy.extents.empty() || (copy.extents.size() == 1 && row_dimensions(copy) == 1));
  return plain ? std::optional(region.bytes()) : std::nullopt;
}

Placed run(std::uint64_t source, std::uint64_t destination, std::uint64_t bytes) {
  return {{{static_cast<Index>(bytes)}, {1}, {1}, DType::u8, DType::u8}, source, destination, 0};
}

std::optional<EngineCopy> engine_copy(const Placed& region, const EngineModel& model) {
  if (const auto bytes = run_bytes(region)) {
    return *bytes >= model.min_bytes
               ? std::optional(EngineCopy{region.source, region.destination, *bytes, 1, 0, 0})
               : std::nullopt;
  }
  const StridedCopy& copy = region.copy;
  if (copy.source_dtype != copy.destination_dtype || copy.extents.size() != 2 ||
      row_dimensions(copy) != 1) {
    return std::nullopt;
  }
  const auto item = static_cast<Index>(copy.destination_item_bytes());
  const Index row = copy.extents[1] * item;
  const Index source_pitch = copy.source_strides[0] * item;
  const Index destination_pitch = copy.destination_strides[0] * item;
  // The driver's pitched copies take 31 bits of pitch.
  constexpr Index kMaxPitch = INT32_MAX;
  if (row < static_cast<Index>(model.min_row_bytes) || source_pitch < row ||
      destination_pitch < row || source_pitch > kMaxPitch || destination_pitch > kMaxPitch ||
      region.bytes() < model.min_bytes) {
    return std::nullopt;
  }
  return EngineCopy{region.source,
                    region.destination,
                    static_cast<std::uint64_t>(row),
                    static_cast<std::uint64_t>(copy.extents[0]),
                    static_cast<std::uint64_t>(source_pitch),
                    static_cast<std::uint64_t>(destination_pitch)};
}

}  // namespace

std::vector<Placed> merge_adjacent(std::vector<Placed> regions) {
  const auto first_other = std::stable_partition(
      regions.begin(), regions.end(), [](const Placed& r) { return run_bytes(r).has_value(); });
  std::sort(regions.begin(), first_other,
            [](const Placed& a, const Placed& b) { return a.source < b.source; });
  std::vector<Placed> merged;
  for (auto at = regions.begin(); at != first_other; ++at) {
    const std::uint64_t bytes = *run_bytes(*at);
    if (bytes == 0) {
      continue;
    }
    if (!merged.empty()) {
      Placed& last = merged.back();
      const std::uint64_t length = last.bytes();
      if (last.source + length == at->source && last.destination + length == at->destination) {
        last.copy.extents[0] = static_cast<Index>(length + bytes);
        continue;
      }
    }
    merged.push_back(run(at->source, at->destination, bytes));
  }
  merged.insert(merged.end(), std::make_move_iterator(first_other),
                std::make_move_iterator(regions.end()));
  return merged;
}

std::vector<Placed> merge_equal_steps(std::vector<Placed> regions) {
  constexpr std::size_t kPeriods = 8;  // families that interleave at the source
  constexpr std::size_t kFewest = 8;   // below, a call is not saved often enough
  constexpr std::uint64_t kSmallest = 64 << 10;
  constexpr std::uint64_t kLargestStep = INT32_MAX;
  const auto first_other =
      std::find_if(regions.begin(), regions.end(), [](const Placed& r) { return !run_bytes(r); });
  const auto count = static_cast<std::size_t>(first_other - regions.begin());
  std::vector<bool> used(count, false);
  std::vector<Placed> merged;
  // Members of the family of @p i with period @p p.
  const auto length_of = [&](std::size_t i, std::size_t p) {
    const std::uint64_t bytes = regions[i].bytes();
    if (i + p >= count || bytes < kSmallest) {
      return std::size_t{1};
    }
    const std::uint64_t source = regions[i + p].source - regions[i].source;
    const std::uint64_t destination = regions[i + p].destination - regions[i].destination;
    if (source < bytes || destination < bytes || source > kLargestStep ||
        destination > kLargestStep) {
      return std::size_t{1};
    }
    std::size_t length = 1;
    for (std::size_t at = i + p;
         at < count && !used[at] && regions[at].bytes() == bytes &&
         regions[at].source - regions[at - p].source == source &&
         regions[at].destination - regions[at - p].destination == destination;
         at += p) {
      ++length;
    }
    return length;
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (used[i]) {
      continue;
    }
    std::size_t best = 1;
    std::size_t period = 0;
    for (std::size_t p = 1; p <= kPeriods; ++p) {
      if (const std::size_t length = length_of(i, p); length > best) {
        best = length;
        period = p;
      }
    }
    if (best < kFewest) {
      merged.push_back(regions[i]);
      continue;
    }
    const std::uint64_t bytes = regions[i].bytes();
    const auto step = [&](std::uint64_t from, std::uint64_t to) {
      return static_cast<Index>(to - from);
    };
    merged.push_back({{{static_cast<Index>(best), static_cast<Index>(bytes)},
                       {step(regions[i].source, regions[i + period].source), 1},
                       {step(regions[i].destination, regions[i + period].destination), 1},
                       DType::u8,
                       DType::u8},
                      regions[i].source,
                      regions[i].destination});
    for (std::size_t k = 0; k < best; ++k) {
      used[i + k * period] = true;
    }
  }
  merged.insert(merged.end(), std::make_move_iterator(first_other),
                std::make_move_iterator(regions.end()));
  return merged;
}

namespace {

struct Candidate {
  EngineCopy copy;
  std::size_t region;
};

double host_cost_us(const EngineCopy& copy, const EngineModel& model) {
  return copy.rows > 1 ? model.rows_us : model.run_us;
}

/// How many of @p candidates, largest first, the engines take without running out of what the
/// kernel fills their pauses with.
std::size_t engine_share(std::span<const Candidate> candidates, std::uint64_t list_bytes,
                         const EngineModel& model) {
  std::size_t count = 0;
  for (const Candidate& candidate : candidates) {
    const std::uint64_t bytes = candidate.copy.bytes();
    const std::uint64_t filling = (count + 1) * model.gap_bytes;
    if (count >= model.max_copies || (bytes < model.alone_bytes && filling > list_bytes - bytes)) {
      break;
    }
    list_bytes -= bytes;
    ++count;
  }
  return count;
}

}  // namespace

Division divide(std::vector<Placed> regions, const EngineModel& model) {
  std::vector<Candidate> candidates;
  std::uint64_t list_bytes = 0;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    list_bytes += regions[i].bytes();
    if (const auto copy = engine_copy(regions[i], model)) {
      candidates.push_back({*copy, i});
    }
  }
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [](const Candidate& a, const Candidate& b) { return a.copy.bytes() > b.copy.bytes(); });
  candidates.resize(engine_share(candidates, list_bytes, model));
  double host_us = 0;
  for (const Candidate& candidate : candidates) {
    host_us += host_cost_us(candidate.copy, model);
  }
  if (host_us > model.host_us) {
    std::erase_if(candidates, [&](const Candidate& candidate) {
      const double saving_us =
          static_cast<double>(candidate.copy.bytes()) * 1e-6 * model.saving_us_per_mb;
      return saving_us < model.host_worth * host_cost_us(candidate.copy, model);
    });
  }
  Division division;
  std::vector<bool> taken(regions.size(), false);
  for (const Candidate& candidate : candidates) {
    taken[candidate.region] = true;
    division.engine.push_back(candidate.copy);
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (!taken[i]) {
      division.list.push_back(regions[i]);
    }
  }
  return division;
}

}  // namespace m2n::nccl
