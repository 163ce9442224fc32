// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// From a plan to the messages that a simulation runs.

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "core/plan/simulate.hpp"

namespace m2n {
namespace {

/// A pattern with what the messages need, worked out once.
struct Prepared {
  std::vector<Rank> ranks;                               // [holding]
  std::vector<std::vector<std::uint32_t>> predecessors;  // [move] earlier moves that fill its box
  bool relays = false;
};

Prepared prepare(const Pattern& pattern) {
  Prepared result;
  const std::size_t holdings = pattern.geometry.source_count() +
                               pattern.geometry.destination_count() + pattern.scratch.size();
  for (std::uint32_t holding = 0; holding < holdings; ++holding) {
    result.ranks.push_back(pattern.rank_of(holding));
  }
  const std::uint32_t sources = pattern.geometry.source_count();
  result.relays = std::any_of(pattern.moves.begin(), pattern.moves.end(),
                              [&](const Move& move) { return move.from >= sources; });
  if (!result.relays) {
    return result;
  }
  std::unordered_map<std::uint64_t, std::uint32_t>
      exact;  // holding, box -> the move that filled it
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> fills;  // holding -> moves into it
  const auto key = [](std::uint32_t holding, std::uint32_t box) {
    return std::uint64_t{holding} << 32 | box;
  };
  result.predecessors.resize(pattern.moves.size());
  for (std::uint32_t m = 0; m < pattern.moves.size(); ++m) {
    const Move& move = pattern.moves[m];
    if (move.from >= sources) {
      const auto found = exact.find(key(move.from, move.box));
      if (found != exact.end()) {
        result.predecessors[m].push_back(found->second);
      } else {
        for (const std::uint32_t other : fills[move.from]) {
          if (intersect(pattern.boxes[pattern.moves[other].box], pattern.boxes[move.box])) {
            result.predecessors[m].push_back(other);
          }
        }
      }
    }
    exact[key(move.to, move.box)] = m;
    fills[move.to].push_back(m);
  }
  return result;
}

/// Parameters that follow one pattern from one stage on.
struct Instance {
  std::uint32_t first_stage = 0;
  std::uint32_t pattern = 0;
  std::uint64_t parameters = 0;
  std::size_t next_move = 0;
  std::vector<std::uint32_t> message_of_move;  // of relays only
};

/// Bytes of a rank's scratch, and the messages that have read them since they were written.
struct SimulatedScratch {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  const Instance* writer = nullptr;
  std::vector<std::uint32_t> readers;
};

}  // namespace

std::vector<SimMessage> messages_of(const Plan& plan, const Problem& problem) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> uses;
  for (std::size_t i = 0; i < problem.parameters().size(); ++i) {
    ++uses[{plan.first_stage[i], plan.pattern_of[i]}];
  }
  std::vector<Prepared> prepared;
  for (const Pattern& pattern : plan.patterns) {
    prepared.push_back(prepare(pattern));
  }
  std::vector<Instance> instances;
  std::map<std::uint32_t, std::vector<std::size_t>> due;  // stage -> instances with moves there
  for (const auto& [start, count] : uses) {
    const Pattern& pattern = plan.patterns[start.second];
    if (!pattern.moves.empty()) {
      due[start.first + pattern.moves.front().stage].push_back(instances.size());
      instances.push_back({start.first, start.second, count, 0, {}});
    }
  }
  std::vector<SimMessage> messages;
  // In the stage at hand: from, to, and what must have arrived.
  std::map<std::tuple<Rank, Rank, std::vector<std::uint32_t>>, std::uint32_t> of_pair;
  std::map<Rank, std::vector<SimulatedScratch>> scratch;
  while (!due.empty()) {
    const std::uint32_t stage = due.begin()->first;
    const std::vector<std::size_t> now = std::move(due.begin()->second);
    due.erase(due.begin());
    of_pair.clear();
    for (const std::size_t i : now) {
      Instance& instance = instances[i];
      const Pattern& pattern = plan.patterns[instance.pattern];
      const Prepared& made = prepared[instance.pattern];
      const std::uint32_t first_scratch =
          pattern.geometry.source_count() + pattern.geometry.destination_count();
      if (made.relays && instance.message_of_move.empty()) {
        instance.message_of_move.resize(pattern.moves.size());
      }
      std::size_t m = instance.next_move;
      for (; m < pattern.moves.size() && instance.first_stage + pattern.moves[m].stage == stage;
           ++m) {
        const Move& move = pattern.moves[m];
        const Rank from = made.ranks[move.from];
        const Rank to = made.ranks[move.to];
        std::vector<std::uint32_t> after;
        if (made.relays) {
          for (const std::uint32_t before : made.predecessors[m]) {
            after.push_back(instance.message_of_move[before]);
          }
          std::sort(after.begin(), after.end());
          after.erase(std::unique(after.begin(), after.end()), after.end());
        }
        const auto [at, added] = of_pair.try_emplace(std::tuple(from, to, after),
                                                     static_cast<std::uint32_t>(messages.size()));
        const std::uint32_t number = at->second;
        if (added) {
          messages.push_back({from, to, stage, 0, std::move(after)});
        }
        SimMessage& message = messages[number];
        message.bytes = checked_add_bytes(
            message.bytes, checked_mul_bytes(pattern.move_bytes(move), instance.parameters));
        if (!made.relays) {
          continue;
        }
        instance.message_of_move[m] = number;
        for (const std::uint32_t holding : {move.from, move.to}) {
          if (holding < first_scratch) {
            continue;
          }
          const ScratchPiece& piece = pattern.scratch[holding - first_scratch];
          const std::uint64_t end =
              piece.offset_bytes + static_cast<std::uint64_t>(piece.box.volume()) *
                                       bytes_of(pattern.geometry.destination->dtype());
          std::vector<SimulatedScratch>& of_rank = scratch[piece.rank];
          auto use = std::find_if(of_rank.begin(), of_rank.end(), [&](const SimulatedScratch& u) {
            return u.writer == &instance && u.begin == piece.offset_bytes && u.end == end;
          });
          if (holding == move.to && (use == of_rank.end() || !use->readers.empty())) {
            // New contents: whatever lay there must have been read.
            for (const SimulatedScratch& old : of_rank) {
              if (old.begin < end && piece.offset_bytes < old.end) {
                message.after.insert(message.after.end(), old.readers.begin(), old.readers.end());
              }
            }
            std::erase_if(of_rank, [&](const SimulatedScratch& old) {
              return old.begin < end && piece.offset_bytes < old.end;
            });
            of_rank.push_back({piece.offset_bytes, end, &instance, {}});
          } else if (holding == move.from && use != of_rank.end()) {
            use->readers.push_back(number);
          }
        }
      }
      instance.next_move = m;
      if (m < pattern.moves.size()) {
        due[instance.first_stage + pattern.moves[m].stage].push_back(i);
      } else {
        instance.message_of_move = {};
      }
    }
  }
  for (std::uint32_t m = 0; m < messages.size(); ++m) {
    auto& after = messages[m].after;
    std::sort(after.begin(), after.end());
    after.erase(std::unique(after.begin(), after.end()), after.end());
    std::erase(after, m);
  }
  return messages;
}

}  // namespace m2n
