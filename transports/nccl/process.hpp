// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Whether another rank's process still runs, for naming who is at fault. No CUDA here.

#include <cstdint>
#include <string>

namespace m2n::nccl {

/// What numbers of processes mean: equal for processes that number others alike, on one system.
/// Empty when it cannot be told.
std::string process_space();

enum class ProcessState : std::uint8_t { unknown, running, stopped, ended };
/// Of process @p number of @p space; "unknown" where this process numbers others differently.
ProcessState process_state(std::uint64_t number, const std::string& space);

}  // namespace m2n::nccl
