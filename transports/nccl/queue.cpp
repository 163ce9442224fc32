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

RoundQueue::RoundQueue(Connection& connection, const SessionMemory& memory, const Links& links,
                       CompiledRound& round, const DeviceRound& device_round,
                       const Control& control)
    : connection_(connection),
      memory_(memory),
      compiled_(round),
      device_round_(device_round),
      control_(control),
      alone_on_device_(links.alone_on_device),
      uses_wire_(links.uses_wire) {
  if (uses_wire_) {
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
  streams_ = connection_.streams.take(compiled_.engine_copies > 0, uses_wire_);
  if (cudaStreamQuery(caller_stream()) != cudaSuccess) {  // something is still under way there
    cudaGetLastError();
    caller_.record(caller_stream());
    caller_.hold(streams_->main);
  }
  memory_.copy_in(streams_->main);
  if (compiled_.replays) {
    if (graph_ == nullptr) {
      capture();
    }
    check(cudaGraphLaunch(graph_, streams_->main), "replay a round");
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
  check(cudaStreamBeginCapture(streams_->main, cudaStreamCaptureModeThreadLocal),
        "capture a round");
  ready_due_ = true;
  ended_ = false;
  for (std::size_t s = 0; s < compiled_.stages.size(); ++s) {
    queue_head(s, true);
    queue_engine(s, true);
    queue_permissions(s);
  }
  queue_last();
  check(cudaStreamEndCapture(streams_->main, &graph), "capture a round");
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
      launch_gate(control_, entry, {}, streams_->main);
    }
    entry = {};
  }
  const bool more = !stage.engine.empty() || !stage.wire.empty();
  if (more) {
    fork_.record(streams_->main);
  }
  if (stage.list.count > 0) {
    ended_ = !more && s + 1 == compiled_.stages.size() && compiled_.last_gates.count == 0;
    launch_list(
        control_, device_round_.tables(), stage.list, entry,
        {stage.engine.empty() ? device_round_.signals(stage.signals) : SignalSlice{}, ended_},
        connection_.options.blocks, streams_->main);
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
    fork_.hold(*streams_->engine);  // otherwise the host has seen the gate open
  }
  stage.engine.queue(*streams_->engine);
  engine_done_.record(*streams_->engine);
  engine_done_.hold(streams_->main);
  ended_ = s + 1 == compiled_.stages.size() && compiled_.last_gates.count == 0;
  launch_gate(control_, {}, {device_round_.signals(stage.signals), ended_}, streams_->main);
}

/// After everything of the stage.
void RoundQueue::queue_permissions(std::size_t s) {
  const Range& permissions = compiled_.stages[s].permissions;
  if (permissions.count > 0) {
    launch_gate(control_, {}, {device_round_.signals(permissions), false}, streams_->main);
  }
}

void RoundQueue::queue_wire(const std::vector<WireStep>& steps) {
  for (const Stream* stream :
       {streams_->pack.get(), streams_->exchange.get(), streams_->unpack.get()}) {
    fork_.hold(*stream);
  }
  const int blocks = connection_.options.blocks;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const WireStep& step = steps[i];
    const std::size_t slot = i % 2;
    if (i >= 2) {
      moved_[slot]->hold(*streams_->pack);         // the slot's last chunk has left
      unpacked_[slot]->hold(*streams_->exchange);  // and its last arrival was read
    }
    if (step.pack.count > 0) {
      launch_list(control_, device_round_.tables(), step.pack, {}, {}, blocks, *streams_->pack);
    }
    packed_[slot]->record(*streams_->pack);
    packed_[slot]->hold(*streams_->exchange);
    connection_.comm->exchange(step.sends, step.receives, *streams_->exchange, deadline_);
    moved_[slot]->record(*streams_->exchange);
    moved_[slot]->hold(*streams_->unpack);
    if (step.unpack.count > 0) {
      launch_list(control_, device_round_.tables(), step.unpack, {}, {}, blocks, *streams_->unpack);
    }
    unpacked_[slot]->record(*streams_->unpack);
  }
  wire_done_.record(*streams_->unpack);
  wire_done_.hold(streams_->main);
  wire_sent_.record(*streams_->exchange);
  wire_sent_.hold(streams_->main);
}

void RoundQueue::queue_last() {
  if (!ended_) {
    launch_gate(control_, entry_for(compiled_.last_gates, 0), {{}, true}, streams_->main);
  }
  check(cudaGetLastError(), "queue a round");
}

void RoundQueue::end() {
  last_round_.record(streams_->main);
  connection_.streams.give(std::move(streams_));
}

bool RoundQueue::drain(Deadline deadline) noexcept {
  const auto is_over = [&](const auto& query) {
    while (query() == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    cudaGetLastError();
    return true;
  };
  if (!streams_) {
    return is_over([&] { return last_round_.query(); });
  }
  for (const Stream* stream : streams_->all()) {
    if (stream != nullptr && !is_over([&] { return cudaStreamQuery(*stream); })) {
      return false;
    }
  }
  connection_.streams.give(std::move(streams_));
  return true;
}

}  // namespace m2n::nccl
