// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// From which length on a row is worth a put of its own, where nobody says: measured.

#include <cstdint>
#include <functional>
#include <optional>

#include "transports/ucx/context.hpp"

namespace m2n::ucx {

class Worker;
struct Peer;

/// Lengths that are measured: powers of two, in bytes.
inline constexpr std::uint64_t kLeastPut = 1 << 10;
inline constexpr std::uint64_t kMostPut = 64 << 10;
/// Where nothing could be measured.
inline constexpr std::uint64_t kUnmeasuredPut = 16 << 10;

/// Seconds that the same bytes take.
struct RowSeconds {
  double put = 0;
  double packed = 0;  ///< And unpacked.
};

/// The least length from which on, up to kMostPut, puts take no longer than packing; 2 * kMostPut
/// when none does.
/// @param measure  Called with kMostPut first, then shorter ones as long as puts are no slower. A
///     length without an answer ends the search.
std::uint64_t first_length_to_put(
    const std::function<std::optional<RowSeconds>(std::uint64_t length)>& measure);

/// Memory that the others write while they measure, and from which this rank writes theirs.
class PutProbe {
 public:
  static constexpr std::uint64_t kBytes = 128 << 10;

  explicit PutProbe(const std::shared_ptr<const Context>& context);

  /// For the peers.
  std::uint64_t address() const;
  std::string key() const { return memory_.key(); }

  /// Measures puts of rows to @p address at @p peer against packing them into messages of
  /// @p chunk_bytes: a few MiB in all, and no new length after a few milliseconds. Waits for puts
  /// of its own as long as @p stop, which is asked meanwhile, returns false.
  std::uint64_t measure(Worker& worker, Peer& peer, std::uint64_t address, const std::string& key,
                        std::uint64_t chunk_bytes, const std::function<bool()>& stop) const;

 private:
  RegisteredMemory memory_;  // what the others write, then what is written from
};

}  // namespace m2n::ucx
