// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Digests of what a rank holds.

#include <cstdint>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// What one rank holds of one parameter: the sum of digest_of_box() over its pieces. Sums of ranks
/// that together hold every element once add up to the tensor's digest, whatever the layout.
struct HeldDigest {
  std::uint32_t parameter = 0;
  std::uint64_t digest = 0;
};

/// One entry a parameter of which @p rank holds anything in @p buffers; full tensors that have gone
/// on into load_weights are left out. @param buffers  Of that side, by Problem::buffers(role)
/// number.
std::vector<HeldDigest> digests_of(const Problem& problem, Role role, Rank rank,
                                   const std::vector<LocalBuffer>& buffers);

}  // namespace m2n
