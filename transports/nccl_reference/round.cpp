// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The steps run on four streams, so that one is packed, exchanged, broadcast and unpacked while
/// its neighbours are. Events are queued only where a step crosses streams, or takes a slot that
/// another step has used: they cost the host a microsecond each.

#include "transports/nccl_reference/round.hpp"

#include "transports/nccl_common/plain_communicator.hpp"

namespace m2n::nccl_reference {

using nccl::check;
using nccl::require_nccl;
using nccl::Stream;

void Round::run() {
  start_.record(stream);
  for (const Stream& lane : lanes_) {
    start_.hold(lane);
  }
  slots_used_ = {};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    queue(steps[i], i % kSlots);
  }
  join(stream);
}

void Round::join(cudaStream_t onto) {
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    lane_over_[lane].record(lanes_[lane]);
    lane_over_[lane].hold(onto);
  }
}

cudaStream_t Round::enter(Lane lane, std::optional<Lane>& last, std::size_t slot, bool uses_slot) {
  if (!last) {
    if (uses_slot && slots_used_[slot]) {
      slot_over_[slot].hold(lanes_[lane]);
    }
  } else if (*last != lane) {
    phase_over_[*last].record(lanes_[*last]);
    phase_over_[*last].hold(lanes_[lane]);
  }
  last = lane;
  return lanes_[lane];
}

void Round::queue(const ReadyStep& step, std::size_t slot) {
  if (step.barrier) {
    join(stream);
    start_.record(stream);
    for (const Stream& lane : lanes_) {
      start_.hold(lane);
    }
  }
  std::optional<Lane> last;
  if (!step.pack.empty()) {
    copy(step.pack, enter(pack_lane, last, slot, step.slot));
  }
  if (!step.sends.empty() || !step.receives.empty()) {
    exchange(step, enter(exchange_lane, last, slot, step.slot));
  }
  if (!step.gather.empty()) {
    copy(step.gather, enter(exchange_lane, last, slot, step.slot));
  }
  if (step.broadcast_bytes > 0) {
    const cudaStream_t on = enter(broadcast_lane, last, slot, step.slot);
    void* const at = reinterpret_cast<void*>(step.whole);
    require_nccl(ncclBroadcast(at, at, step.broadcast_bytes, ncclUint8, root, members, on),
                 "broadcast", members);
  }
  if (!step.unpack.empty()) {
    copy(step.unpack, enter(unpack_lane, last, slot, step.slot));
  }
  if (step.slot && last) {
    slot_over_[slot].record(lanes_[*last]);
    slots_used_[slot] = true;
  }
}

void Round::exchange(const ReadyStep& step, cudaStream_t on) {
  const bool group = step.sends.size() + step.receives.size() > 1;
  if (group) {
    require_nccl(ncclGroupStart(), "start a group", world);
  }
  ncclResult_t result = ncclSuccess;
  for (const auto& m : step.sends) {
    const ncclResult_t sent = ncclSend(reinterpret_cast<const void*>(m.address), m.bytes, ncclUint8,
                                       static_cast<int>(m.peer), world, on);
    result = result == ncclSuccess ? sent : result;
  }
  for (const auto& m : step.receives) {
    const ncclResult_t received = ncclRecv(reinterpret_cast<void*>(m.address), m.bytes, ncclUint8,
                                           static_cast<int>(m.peer), world, on);
    result = result == ncclSuccess ? received : result;
  }
  const ncclResult_t end = group ? ncclGroupEnd() : ncclSuccess;
  require_nccl(result, "send and receive", world);
  require_nccl(end, "send and receive", world);
}

void Round::copy(const Copies& copies, cudaStream_t on) const {
  for (const Copies::Plain& plain : copies.plain) {
    check(cudaMemcpyAsync(reinterpret_cast<void*>(plain.destination),
                          reinterpret_cast<const void*>(plain.source), plain.bytes,
                          cudaMemcpyDeviceToDevice, on),
          "queue a copy");
  }
  for (const RunList& list : copies.lists) {
    launch_runs(reinterpret_cast<const Run*>(table.data()), list, on);
  }
  check(cudaGetLastError(), "queue copies");
}

}  // namespace m2n::nccl_reference
