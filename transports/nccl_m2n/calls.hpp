// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Parameters as calls of NVIDIA's reshard library.

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "transports/nccl_m2n/forms.hpp"
#include "transports/nccl_m2n/library.hpp"

namespace m2n::nccl_m2n {

/// Forms as the library wants them. Addresses inside stay valid: entries are never moved.
class Calls {
 public:
  /// @param name  Of the parameter, for messages. Addresses are 0 where the rank holds nothing.
  void add(const Form& form, std::string name, std::uint64_t source, std::uint64_t destination);
  /// Queues all of them on @p stream.
  void queue(const Library& library, Handle handle, ncclComm_t comm, bool grouped,
             cudaStream_t stream);

 private:
  struct SideCall {
    Mesh mesh;
    Tensor tensor;
    std::vector<int> dims;
    std::vector<int> placements;
    std::vector<std::size_t> shape;

    void set(const SideForm& form, DType dtype, std::uint64_t address);
  };
  struct Entry {
    std::string name;
    std::array<SideCall, 2> sides;
  };
  std::deque<Entry> entries_;
};

}  // namespace m2n::nccl_m2n
