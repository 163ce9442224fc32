// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The kernels of the NCCL transport. Every launch returns at once and may be captured.

#include <cuda_runtime.h>

#include <cstdint>

#include "transports/nccl/task.hpp"

namespace m2n::nccl {

/// Words that a session's kernels share with the host, in pinned host memory.
struct HostWords {
  std::uint64_t abort;     ///< Set by the host: kernels stop waiting.
  std::uint64_t opened;    ///< round * stride + stage + 1 once that stage's gates were open.
  std::uint64_t finished;  ///< The round that has ended on this rank.
  std::uint64_t failed;    ///< Not 0 once a wait was given up.
};

/// The head of a control block in device memory; flags follow. Peers write flags and @p abort.
struct ControlHead {
  std::uint64_t round;  ///< Of the round in progress.
  std::uint64_t abort;  ///< Set by a peer that gave up: 1 + the rank that it waited for.
  std::uint64_t failed;
  std::uint64_t arrived;  ///< Thread blocks of the list in progress that are done.
};

struct Control {
  ControlHead* head = nullptr;
  volatile std::uint64_t* flags = nullptr;
  HostWords* host = nullptr;
  std::uint64_t stride = 1;  ///< Flag values of a round: round * stride + add.
};

struct DeviceTables {
  const Task* tasks = nullptr;
  const Loop* loops = nullptr;
};

struct SignalSlice {
  const Signal* signals = nullptr;
  std::uint32_t count = 0;
};

/// What a kernel does before its work: tells sources that memory may be written, then waits until
/// every gate is open or the round is given up.
struct Entry {
  SignalSlice ready;
  const Gate* gates = nullptr;
  std::uint32_t gate_count = 0;
  std::uint32_t opened = 0;  ///< Not 0: written to HostWords::opened once the gates are open.
};

/// What a kernel does after its work, unless the round was given up.
struct Exit {
  SignalSlice signals;
  bool last = false;  ///< The round ends here: the host is told, and the round counted up.
};

/// Loads every kernel of a round on the current device. The driver otherwise loads a kernel at its
/// first launch and may then wait for all that runs: forever, when that waits for the launch.
void load_kernels();

/// Entry and exit without any work.
void launch_gate(const Control& control, const Entry& entry, const Exit& exit, cudaStream_t stream);
/// Runs a list. Every thread block waits at the entry: with gates, nothing that they depend on may
/// need this device.
void launch_list(const Control& control, DeviceTables tables, ListSlice list, const Entry& entry,
                 const Exit& exit, int blocks, cudaStream_t stream);
/// Writes @p mark at @p words: addresses of ControlHead::abort of peers.
void launch_abort(const std::uint64_t* const* words, std::uint32_t count, std::uint64_t mark,
                  cudaStream_t stream);

}  // namespace m2n::nccl
