// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A program as a round runs it on one rank: stage by stage the gates that it waits for, its list,
/// its engine copies, its steps on the wire, and the flags that it sets.

#include <cstdint>
#include <vector>

#include "transports/nccl/engine.hpp"
#include "transports/nccl/kernels.hpp"
#include "transports/nccl/links.hpp"
#include "transports/nccl/options.hpp"
#include "transports/nccl/session_memory.hpp"
#include "transports/nccl/tables.hpp"
#include "transports/nccl/wire.hpp"

namespace m2n::nccl {

/// [begin, begin + count) of a table.
struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

struct Stage {
  Range gates;
  Range signals;
  Range permissions;  ///< Signals to those who write scratch here in a later stage.
  ListSlice list;
  EngineBatch engine;
  std::vector<WireStep> wire;

  bool empty() const { return list.count == 0 && engine.empty() && wire.empty(); }
};

/// Flags of a round grow to round * stride + something, so that nothing is reset between rounds.
struct CompiledRound {
  std::vector<Stage> stages;
  Range ready;       ///< Signals: "my memory may be written".
  Range last_gates;  ///< Open when everything has landed here.
  std::uint64_t stride = 1;
  bool replays = false;  ///< The round is captured once and replayed.
  std::uint64_t engine_copies = 0;

  Tables tables;
  std::vector<Gate> gates;
  std::vector<Signal> signals;
  DeviceMemory staging;

  /// On the wire, the ranks of a pair end every step by sending each other the number of the round.
  /// The library tells of a group only as a whole; the marks tell whose part of it has not come.
  DeviceMemory marks;               ///< One number a mark.
  std::vector<std::size_t> marked;  ///< By mark: the rank that sends it.
};

/// Flag of rank r in a control block: "r may be written" is flag r, "what r wrote has landed" is
/// flag world + r.
CompiledRound compile(const Program& program, const SessionMemory& memory, const Links& links,
                      const NcclOptions& options, std::size_t world);

/// The tables of a compiled round on the current device.
class DeviceRound {
 public:
  DeviceRound(const CompiledRound& round, const Links& links);

  DeviceTables tables() const { return tables_; }
  const Gate* gates(const Range& range) const { return gates_ + range.begin; }
  SignalSlice signals(const Range& range) const {
    return {signals_ + range.begin, static_cast<std::uint32_t>(range.count)};
  }
  /// Tells every mapped peer that this rank has given up, and that @p rank is why.
  void abort(std::size_t rank, cudaStream_t stream) const;
  std::uint64_t bytes() const { return memory_.bytes(); }
  void leak() { memory_.leak(); }

 private:
  DeviceMemory memory_;
  DeviceTables tables_;
  const Gate* gates_ = nullptr;
  const Signal* signals_ = nullptr;
  const std::uint64_t* const* abort_words_ = nullptr;
  std::uint32_t abort_count_ = 0;
};

}  // namespace m2n::nccl
