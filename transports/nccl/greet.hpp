// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Connects ranks that will send to each other.

#include <vector>

#include "transports/nccl/communicator.hpp"

namespace m2n::nccl {

/// Exchanges a word with every one of @p peers, who do the same. The library connects two ranks
/// when they first send, and until then a call may wait for the peer.
/// @throws TransportError naming the peers that did not come; the communicator is aborted then.
void greet(Communicator& comm, const std::vector<Rank>& peers, Deadline deadline);

}  // namespace m2n::nccl
