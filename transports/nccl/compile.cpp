// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/compile.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace m2n::nccl {
namespace {

/// What a stage moves, before it is divided.
struct StageWork {
  std::vector<Placed> local;
  std::vector<Placed> remote;
  std::map<std::size_t, PairRegions> wire_sends;
  std::map<std::size_t, PairRegions> wire_receives;
  std::set<std::size_t> to;            // mapped
  std::set<std::size_t> from;          // mapped
  std::set<std::size_t> to_scratch;    // of `to`: those whose scratch is written
  std::set<std::size_t> from_scratch;  // of `from`: those that write scratch here

  bool empty() const {
    return local.empty() && remote.empty() && wire_sends.empty() && wire_receives.empty();
  }
  std::size_t pairs() const { return wire_sends.size() + wire_receives.size(); }
};

std::vector<PairRegions> values(const std::map<std::size_t, PairRegions>& pairs) {
  std::vector<PairRegions> out;
  for (const auto& [peer, pair] : pairs) {
    out.push_back(pair);
  }
  return out;
}

/// The steps of compile().
class Compiler {
 public:
  Compiler(const Program& program, const SessionMemory& memory, const Links& links,
           const NcclOptions& options, std::size_t world)
      : program_(program),
        memory_(memory),
        links_(links),
        options_(options),
        rank_(static_cast<std::size_t>(program.rank)),
        world_(world),
        work_(program.stage_count) {}

  CompiledRound run() {
    sort_regions();
    round_.stride = program_.stage_count + 1;
    add_ready_signals();
    std::size_t pairs = 0;
    for (const StageWork& work : work_) {
      pairs = std::max(pairs, work.pairs());
    }
    Staging staging{0, slot_bytes_for(pairs, links_.limits)};
    round_.staging = DeviceMemory(2 * staging.slot_bytes);
    staging.address = reinterpret_cast<std::uint64_t>(round_.staging.data());
    round_.stages.resize(work_.size());
    for (std::size_t s = 0; s < work_.size(); ++s) {
      divide_stage(s, staging);
      add_flags(s);
    }
    round_.last_gates.begin = round_.gates.size();
    wait_for_landed();
    round_.last_gates.count = round_.gates.size() - round_.last_gates.begin;
    add_marks();
    round_.replays = options_.graph == GraphChoice::on ||
                     (options_.graph == GraphChoice::automatic &&
                      std::all_of(round_.stages.begin(), round_.stages.end(), [](const Stage& s) {
                        return s.engine.empty() && s.wire.empty();
                      }));
    return std::move(round_);
  }

 private:
  /// Regions by stage and by how they travel.
  void sort_regions() {
    for (const Region& region : program_.copies) {
      if (region.bytes > 0) {
        work_[region.stage].local.push_back({region.copy, memory_.address(region.from),
                                             memory_.address(region.to), scales_of(region)});
      }
    }
    for (const Region& region : program_.sends) {
      if (region.bytes > 0) {
        sort_send(region);
      }
    }
    for (const Region& region : program_.receives) {
      if (region.bytes > 0) {
        sort_receive(region);
      }
    }
  }

  std::uint64_t scales_of(const Region& region) const {
    return region.copy.quantises() ? memory_.address(region.scales) : 0;
  }

  void sort_send(const Region& region) {
    const auto to = static_cast<std::size_t>(region.to.rank);
    StageWork& work = work_[region.stage];
    const Path path = links_.to.at(to);
    if (path == Path::wire) {
      PairRegions& pair = work.wire_sends[to];
      pair.peer = region.to.rank;
      pair.regions.push_back({region.copy, memory_.address(region.from), 0, scales_of(region)});
      return;
    }
    (path == Path::local ? work.local : work.remote)
        .push_back({region.copy, memory_.address(region.from), links_.address(region.to),
                    scales_of(region)});
    work.to.insert(to);
    if (region.to.role == Role::scratch) {
      work.to_scratch.insert(to);
    }
  }

  void sort_receive(const Region& region) {
    const auto from = static_cast<std::size_t>(region.from.rank);
    StageWork& work = work_[region.stage];
    if (links_.from.at(from) == Path::wire) {
      PairRegions& pair = work.wire_receives[from];
      pair.peer = region.from.rank;
      pair.regions.push_back({region.copy, 0, memory_.address(region.to), 0});
      return;
    }
    work.from.insert(from);
    if (region.to.role == Role::scratch) {
      work.from_scratch.insert(from);
    }
  }

  std::uint64_t flag_address(std::size_t peer, std::size_t flag) const {
    return links_.control_of.at(peer) + sizeof(ControlHead) + flag * sizeof(std::uint64_t);
  }

  /// Scratch is used over and over: who writes it in a stage must wait until this rank has done
  /// all its earlier ones. A permission is the first stage that is not done yet.
  void add_ready_signals() {
    std::set<std::size_t> sources;
    for (std::size_t s = 0; s < work_.size(); ++s) {
      sources.insert(work_[s].from.begin(), work_[s].from.end());
      for (const std::size_t source : work_[s].from_scratch) {
        last_scratch_[source] = s;
      }
    }
    not_done_.resize(work_.size() + 1);
    not_done_.back() = static_cast<std::uint32_t>(work_.size());
    for (std::size_t s = work_.size(); s-- > 0;) {
      not_done_[s] = work_[s].empty() ? not_done_[s + 1] : static_cast<std::uint32_t>(s);
    }
    for (const std::size_t source : sources) {
      round_.signals.push_back(
          {flag_address(source, rank_), last_scratch_.contains(source) ? not_done_[0] : 0});
    }
    round_.ready = {0, round_.signals.size()};
  }

  EngineModel engine_model() const {
    EngineModel model = options_.engine;
    if (options_.graph == GraphChoice::on) {
      // Nodes of a graph cost an engine more than copies of a batch.
      model.min_bytes = std::max<std::uint64_t>(model.min_bytes, 16 << 20);
      model.gap_bytes = std::max<std::uint64_t>(model.gap_bytes, 1'200'000);
      model.alone_bytes = std::max<std::uint64_t>(model.alone_bytes, 128 << 20);
    }
    return model;
  }

  void divide_stage(std::size_t s, const Staging& staging) {
    StageWork& work = work_[s];
    Stage& stage = round_.stages[s];
    stage_works_ = !work.empty();
    Division division =
        divide(merge_equal_steps(merge_adjacent(std::move(work.remote))), engine_model());
    std::vector<Placed> list = merge_adjacent(std::move(work.local));
    list.insert(list.end(), std::make_move_iterator(division.list.begin()),
                std::make_move_iterator(division.list.end()));
    stage.list = append_list(list, round_.tables);
    round_.engine_copies += division.engine.size();
    stage.engine = EngineBatch(division.engine, options_.graph == GraphChoice::on);
    stage.wire = compile_wire(values(work.wire_sends), values(work.wire_receives), links_.limits,
                              staging, round_.tables);
  }

  void add_flags(std::size_t s) {
    const StageWork& work = work_[s];
    Stage& stage = round_.stages[s];
    stage.gates.begin = round_.gates.size();
    if (!stage.empty()) {
      wait_for_landed();
      for (const std::size_t to : work.to) {
        if (work.to_scratch.contains(to)) {
          allowed_.insert(to);
          round_.gates.push_back({static_cast<std::uint32_t>(to), static_cast<std::uint32_t>(s)});
        } else if (allowed_.insert(to).second) {
          round_.gates.push_back({static_cast<std::uint32_t>(to), 0});
        }
      }
    }
    stage.gates.count = round_.gates.size() - stage.gates.begin;
    stage.signals.begin = round_.signals.size();
    for (const std::size_t to : work.to) {
      round_.signals.push_back({flag_address(to, world_ + rank_), s + 1});
    }
    stage.signals.count = round_.signals.size() - stage.signals.begin;
    stage.permissions.begin = round_.signals.size();
    for (const auto& [source, last] : last_scratch_) {
      if (stage_works_ && s < last) {
        round_.signals.push_back({flag_address(source, rank_), not_done_[s + 1]});
      }
    }
    stage.permissions.count = round_.signals.size() - stage.permissions.begin;
    for (const std::size_t source : work.from) {
      landed_[source] = static_cast<std::uint32_t>(s + 1);
    }
  }

  void add_marks() {
    std::vector<Message*> received;
    for (Stage& stage : round_.stages) {
      for (WireStep& step : stage.wire) {
        std::set<Rank> peers;
        for (const auto* messages : {&step.sends, &step.receives}) {
          for (const Message& message : *messages) {
            peers.insert(message.peer);
          }
        }
        for (const Rank peer : peers) {
          step.sends.push_back({peer, round_number(), sizeof(std::uint64_t)});
          step.receives.push_back({peer, round_.marked.size(), sizeof(std::uint64_t)});
          round_.marked.push_back(static_cast<std::size_t>(peer));
        }
        for (std::size_t i = step.receives.size() - peers.size(); i < step.receives.size(); ++i) {
          received.push_back(&step.receives[i]);
        }
      }
    }
    round_.marks = DeviceMemory(round_.marked.size() * sizeof(std::uint64_t));
    for (Message* message : received) {  // its place among the marks, so far
      message->address = reinterpret_cast<std::uint64_t>(round_.marks.data()) +
                         message->address * sizeof(std::uint64_t);
    }
  }

  std::uint64_t round_number() const {
    return reinterpret_cast<std::uint64_t>(memory_.control().data()) + offsetof(ControlHead, round);
  }

  void wait_for_landed() {
    for (const auto& [source, stage] : landed_) {
      round_.gates.push_back({static_cast<std::uint32_t>(world_ + source), stage});
    }
    landed_.clear();
  }

  const Program& program_;
  const SessionMemory& memory_;
  const Links& links_;
  const NcclOptions& options_;
  std::size_t rank_;
  std::size_t world_;
  std::vector<StageWork> work_;  // by stage
  bool stage_works_ = false;
  std::map<std::size_t, std::size_t> last_scratch_;  // by source: last stage that writes scratch
  std::vector<std::uint32_t> not_done_;              // [stage] the first from there on with work
  std::map<std::size_t, std::uint32_t> landed_;      // by source: stage that is waited for next
  std::set<std::size_t> allowed_;                    // destinations whose permission is waited for
  CompiledRound round_;
};

}  // namespace

CompiledRound compile(const Program& program, const SessionMemory& memory, const Links& links,
                      const NcclOptions& options, std::size_t world) {
  return Compiler(program, memory, links, options, world).run();
}

DeviceRound::DeviceRound(const CompiledRound& round, const Links& links) {
  std::vector<const std::uint64_t*> marks;
  for (const auto& [peer, at] : links.control_of) {
    marks.push_back(reinterpret_cast<const std::uint64_t*>(at + offsetof(ControlHead, abort)));
  }
  std::uint64_t bytes = 0;
  const auto room = [&](const auto& table) {
    const std::uint64_t at = bytes;
    bytes += align_up(table.size() * sizeof table[0]);
    return at;
  };
  const std::uint64_t tasks_at = room(round.tables.tasks);
  const std::uint64_t loops_at = room(round.tables.loops);
  const std::uint64_t gates_at = room(round.gates);
  const std::uint64_t signals_at = room(round.signals);
  const std::uint64_t marks_at = room(marks);
  memory_ = DeviceMemory(bytes);
  std::byte* base = memory_.data();
  const auto copy = [&](const auto& table, std::uint64_t at) {
    if (!table.empty()) {
      check(cudaMemcpy(base + at, table.data(), table.size() * sizeof table[0],
                       cudaMemcpyHostToDevice),
            "upload the tables");
    }
  };
  copy(round.tables.tasks, tasks_at);
  copy(round.tables.loops, loops_at);
  copy(round.gates, gates_at);
  copy(round.signals, signals_at);
  copy(marks, marks_at);
  tables_ = {reinterpret_cast<const Task*>(base + tasks_at),
             reinterpret_cast<const Loop*>(base + loops_at)};
  gates_ = reinterpret_cast<const Gate*>(base + gates_at);
  signals_ = reinterpret_cast<const Signal*>(base + signals_at);
  abort_count_ = static_cast<std::uint32_t>(marks.size());
  abort_words_ =
      marks.empty() ? nullptr : reinterpret_cast<const std::uint64_t* const*>(base + marks_at);
}

void DeviceRound::abort(std::size_t rank, cudaStream_t stream) const {
  if (abort_words_ != nullptr) {
    launch_abort(abort_words_, abort_count_, rank + 1, stream);
  }
}

}  // namespace m2n::nccl
