// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// A stand-in for device memory: pages of the host that no address of theirs reaches. Whoever
/// touches them other than through Memory crashes. And a transport between such memories.

#include <cstdint>
#include <memory>

#include "core/api/memory.hpp"
#include "core/api/transport.hpp"

namespace m2n::testing {

/// Two devices of host pages, mapped twice: at the addresses that are handed out, where every
/// access is forbidden, and at others, which only this memory knows.
std::unique_ptr<const m2n::Memory> make_paged_memory();

/// Bytes that arenas of paged memory hold now.
std::uint64_t paged_bytes();
/// Bytes of the host that are pinned for it now.
std::uint64_t pinned_bytes();

/// Moves device memory, and nothing else: each rank copies to itself, stage by stage, with the
/// group's barriers between. Ranks are threads of one process.
std::unique_ptr<Transport> make_paged_transport();

}  // namespace m2n::testing
