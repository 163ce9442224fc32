// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Loopback between processes of one machine. A sender packs regions into the receiver's rings of
/// shared memory; the receiver unpacks them. Nobody touches the weights of another process, so a
/// rank may leave, or be killed, at any moment.

#include <memory>

#include "core/api/transport.hpp"

namespace m2n::loopback {

/// Collective. Finds out whether all ranks run on one machine.
/// @throws TransportError{unavailable}, the same on every rank, naming the ranks that do not.
void connect_processes(Group& group, Deadline deadline);

/// Collective. Memory: at most 8 MiB of rings a rank, or 16 KiB a rank that sends to it, if more.
std::unique_ptr<Session> prepare_in_processes(Group& group, const Program& program,
                                              const Buffers& buffers, Deadline deadline);

}  // namespace m2n::loopback
