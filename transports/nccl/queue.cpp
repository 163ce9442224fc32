// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// A round, on the device:
///
///     begin      counts the round up and tells every mapped source "my memory may be written"
///     per stage  gate    holds the main stream until the peers' flags allow the stage
///                list    one launch: local copies, and writes into mapped peers
///                engine  contiguous copies into mapped peers, on their own stream
///                wire    pack, send and receive, unpack, step by step on three streams
///                signal  tells every mapped destination "all of this stage has landed"
///     last gate  holds until everything has landed here, then tells the host
///
/// Flags only grow, so that nothing is reset between rounds. Copies of the engines cannot be called
/// back, so the host queues them once the gate is open; in a captured round they follow the gate.

#include "transports/nccl/queue.hpp"

#include <thread>
#include <utility>

namespace m2n::nccl {
namespace {

std::uint32_t opened_value(std::size_t stage) { return static_cast<std::uint32_t>(stage + 1); }

}  // namespace

RoundQueue::RoundQueue(const Connection& connection, const SessionMemory& memory,
                       const Links& links, CompiledRound& round, const DeviceRound& device_round,
                       const Control& control)
    : connection_(connection),
      memory_(memory),
      compiled_(round),
      device_round_(device_round),
      control_(control),
      alone_on_device_(links.alone_on_device) {
  if (round.engine_copies > 0) {
    engine_ = std::make_unique<Stream>();
  }
  if (links.uses_wire) {
    pack_ = std::make_unique<Stream>();
    exchange_ = std::make_unique<Stream>();
    unpack_ = std::make_unique<Stream>();
    for (int slot = 0; slot < 2; ++slot) {
      packed_.push_back(std::make_unique<Event>());
      moved_.push_back(std::make_unique<Event>());
      unpacked_.push_back(std::make_unique<Event>());
    }
  }
}

RoundQueue::~RoundQueue() {
  if (graph_ != nullptr) {
    cudaGraphExecDestroy(graph_);
  }
}

cudaStream_t RoundQueue::caller_stream() const {
  const std::uint64_t stream = connection_.options.stream;
  return stream == 0 ? cudaStreamLegacy : reinterpret_cast<cudaStream_t>(stream);
}

void RoundQueue::begin(std::uint64_t round, Deadline deadline) {
  round_ = round;
  deadline_ = deadline;
  if (cudaStreamQuery(caller_stream()) != cudaSuccess) {  // something is still under way there
    cudaGetLastError();
    caller_.record(caller_stream());
    caller_.hold(main_);
  }
  memory_.copy_in(main_);
  if (compiled_.replays) {
    if (graph_ == nullptr) {
      capture();
    }
    check(cudaGraphLaunch(graph_, main_), "replay a round");
    next_stage_ = compiled_.stages.size() + 1;
    return;
  }
  ready_due_ = compiled_.ready.count > 0;
  ended_ = false;
  next_stage_ = 0;
  head_queued_ = false;
  pump(deadline);
}

bool RoundQueue::pump(Deadline deadline) {
  deadline_ = deadline;
  bool queued = false;
  while (next_stage_ < compiled_.stages.size()) {
    if (!head_queued_) {
      queue_head(next_stage_, false);
      head_queued_ = true;
      queued = true;
    }
    if (!compiled_.stages[next_stage_].engine.empty()) {
      if (PinnedWords::read(control_.host->opened) <
          round_ * compiled_.stride + opened_value(next_stage_)) {
        return queued;
      }
      queue_engine(next_stage_, false);
      queued = true;
    }
    queue_permissions(next_stage_);
    head_queued_ = false;
    ++next_stage_;
  }
  if (next_stage_ == compiled_.stages.size()) {
    queue_last();
    ++next_stage_;
    queued = true;
  }
  return queued;
}

void RoundQueue::capture() {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(main_, cudaStreamCaptureModeThreadLocal), "capture a round");
  ready_due_ = true;
  ended_ = false;
  for (std::size_t s = 0; s < compiled_.stages.size(); ++s) {
    queue_head(s, true);
    queue_engine(s, true);
    queue_permissions(s);
  }
  queue_last();
  check(cudaStreamEndCapture(main_, &graph), "capture a round");
  const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
  cudaGraphDestroy(graph);
  check(made, "make a graph of a round");
}

/// Entry of the next kernel; the first one of a round carries the permissions to write here.
Entry RoundQueue::entry_for(const Range& gates, std::uint32_t opened) {
  return {std::exchange(ready_due_, false) ? device_round_.signals(compiled_.ready) : SignalSlice{},
          device_round_.gates(gates), static_cast<std::uint32_t>(gates.count), opened};
}

/// Gate, list and wire of a stage.
void RoundQueue::queue_head(std::size_t s, bool captured) {
  const Stage& stage = compiled_.stages[s];
  if (stage.empty()) {
    return;
  }
  const bool called_back = !captured && !stage.engine.empty();
  Entry entry = entry_for(stage.gates, called_back ? opened_value(s) : 0);
  // Blocks that wait hold the device: only where no rank that they wait for needs it.
  const bool fused = alone_on_device_ && stage.list.count > 0 && stage.wire.empty() &&
                     (stage.engine.empty() || called_back);
  if (!fused) {
    if (entry.gate_count > 0 || entry.ready.count > 0 || called_back) {
      launch_gate(control_, entry, {}, main_);
    }
    entry = {};
  }
  const bool more = !stage.engine.empty() || !stage.wire.empty();
  if (more) {
    fork_.record(main_);
  }
  if (stage.list.count > 0) {
    ended_ = !more && s + 1 == compiled_.stages.size() && compiled_.last_gates.count == 0;
    launch_list(
        control_, device_round_.tables(), stage.list, entry,
        {stage.engine.empty() ? device_round_.signals(stage.signals) : SignalSlice{}, ended_},
        connection_.options.blocks, main_);
  }
  if (!stage.wire.empty()) {
    queue_wire(stage.wire);
  }
}

void RoundQueue::queue_engine(std::size_t s, bool captured) {
  Stage& stage = compiled_.stages[s];
  if (stage.engine.empty()) {
    return;
  }
  if (captured) {
    fork_.hold(*engine_);  // otherwise the host has seen the gate open
  }
  stage.engine.queue(*engine_);
  engine_done_.record(*engine_);
  engine_done_.hold(main_);
  ended_ = s + 1 == compiled_.stages.size() && compiled_.last_gates.count == 0;
  launch_gate(control_, {}, {device_round_.signals(stage.signals), ended_}, main_);
}

/// After everything of the stage.
void RoundQueue::queue_permissions(std::size_t s) {
  const Range& permissions = compiled_.stages[s].permissions;
  if (permissions.count > 0) {
    launch_gate(control_, {}, {device_round_.signals(permissions), false}, main_);
  }
}

void RoundQueue::queue_wire(const std::vector<WireStep>& steps) {
  for (const Stream* stream : {pack_.get(), exchange_.get(), unpack_.get()}) {
    fork_.hold(*stream);
  }
  const int blocks = connection_.options.blocks;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const WireStep& step = steps[i];
    const std::size_t slot = i % 2;
    if (i >= 2) {
      moved_[slot]->hold(*pack_);         // the slot's last chunk has left
      unpacked_[slot]->hold(*exchange_);  // and its last arrival was read
    }
    if (step.pack.count > 0) {
      launch_list(control_, device_round_.tables(), step.pack, {}, {}, blocks, *pack_);
    }
    packed_[slot]->record(*pack_);
    packed_[slot]->hold(*exchange_);
    connection_.comm->exchange(step.sends, step.receives, *exchange_, deadline_);
    moved_[slot]->record(*exchange_);
    moved_[slot]->hold(*unpack_);
    if (step.unpack.count > 0) {
      launch_list(control_, device_round_.tables(), step.unpack, {}, {}, blocks, *unpack_);
    }
    unpacked_[slot]->record(*unpack_);
  }
  wire_done_.record(*unpack_);
  wire_done_.hold(main_);
  wire_sent_.record(*exchange_);
  wire_sent_.hold(main_);
}

void RoundQueue::queue_last() {
  if (!ended_) {
    launch_gate(control_, entry_for(compiled_.last_gates, 0), {{}, true}, main_);
  }
  check(cudaGetLastError(), "queue a round");
}

bool RoundQueue::drain(Deadline deadline) noexcept {
  const Stream* const streams[] = {&main_,      &side_,          engine_.get(),
                                   pack_.get(), exchange_.get(), unpack_.get()};
  for (const Stream* stream : streams) {
    while (stream != nullptr && cudaStreamQuery(*stream) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  cudaGetLastError();
  return true;
}

}  // namespace m2n::nccl
