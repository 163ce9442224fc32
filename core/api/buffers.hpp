// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Local memory that a source or a sink lends, and a rank's buffers by the numbers of a problem.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor/dtype.hpp"
#include "core/tensor/shape.hpp"

namespace m2n {

enum class MemorySpace : std::uint8_t { host, device };
std::string_view to_string(MemorySpace space);

/// Where weights live.
struct MemoryPlace {
  MemorySpace space = MemorySpace::host;
  int device = 0;  ///< CUDA ordinal, for device memory.
};

/// Memory on loan: owned by the lender, who says for how long.
struct LocalBuffer {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  MemorySpace space = MemorySpace::host;
  int device = 0;  ///< CUDA ordinal, for device memory.

  /// What follows the first @p offset_bytes. For views, whose strides may lead back before them.
  LocalBuffer from(std::uint64_t offset_bytes) const {
    return {data + offset_bytes, bytes - offset_bytes, space, device};
  }
};

/// What a lender hands over for one parameter: its own words for what it is (checked against the
/// declaration before a byte moves), and one buffer a slot of the parameter's side. A rank that
/// holds nothing of it lends empty buffers.
struct ParamLoan {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;  ///< Global.
  std::vector<LocalBuffer> slots;
};

/// A rank's buffers by Problem::buffers(role) number; data is null where the rank holds nothing.
struct Buffers {
  std::vector<LocalBuffer> source;
  std::vector<LocalBuffer> destination;
};

}  // namespace m2n
