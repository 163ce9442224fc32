// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The buffers of every rank of a problem in this process: made, filled, spoilt and checked, in
/// memory of either kind.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api/memory.hpp"
#include "core/api/values.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// How the buffers of a destination follow one another in memory.
enum class BufferOrder : std::uint8_t {
  declared,  ///< As the parameters do, on both sides: neighbouring regions become one.
  shuffled,  ///< In an order of their own, as an engine allocates them.
};

/// Bytes that the buffers of @p problem take, by device. Rank r uses device r mod devices.
std::map<int, std::uint64_t> needed_bytes(const Problem& problem, int devices);

/// Source buffers hold the synthetic values of their parameters' names.
///
/// - Collective: no.
/// - Threads: calls for different ranks.
/// - Memory: owned. @p problem and @p values must outlive this.
/// - Streams: see Memory.
/// - Errors: Error{unavailable} naming device, bytes needed and free; that of the device.
class WorldBuffers {
 public:
  /// @param values  The synthetic values of the problem's parameters, for the oracle.
  WorldBuffers(const Problem& problem, const TensorValues& values, MemorySpace space,
               BufferOrder order);

  MemorySpace space() const noexcept { return space_; }
  const Memory& memory() const noexcept { return memory_; }
  int device_of(Rank rank) const noexcept { return static_cast<int>(rank) % devices_; }
  const Buffers& of(Rank rank) const { return buffers_[static_cast<std::size_t>(rank)]; }

  /// Writes the values of the source's pieces of @p rank.
  void fill(Rank rank) const;
  /// Works out what check() will expect of @p rank, from what the sources hold. Once they are all
  /// filled.
  void expect(Rank rank);

  /// Overwrites every destination byte of @p rank with noise that depends on @p seed.
  void poison(Rank rank, std::uint64_t seed) const;
  /// Compares what @p rank holds with the sources: by digests, where no element is cast. In host
  /// memory, and where elements are cast, @p oracle also compares every element with its value.
  /// @return the first difference in words; empty when there is none.
  std::string check(Rank rank, bool oracle) const;

 private:
  std::string check_elements(Rank rank) const;

  const Problem& problem_;
  const TensorValues& values_;
  MemorySpace space_;
  const Memory& memory_;
  int devices_ = 1;
  bool casts_ = false;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<Buffers> buffers_;                      // [rank]
  std::vector<std::vector<std::uint64_t>> expected_;  // [rank][piece of a parameter not cast]
};

}  // namespace m2n
