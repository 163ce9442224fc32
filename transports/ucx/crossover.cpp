// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/crossover.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "transports/ucx/worker.hpp"

namespace m2n::ucx {
namespace {

using Clock = std::chrono::steady_clock;

/// After which no new length is measured.
constexpr std::chrono::milliseconds kBudget{5};
/// Of each figure the best of so many counts. Others work on this machine, too, so that what is
/// compared is measured in turns.
constexpr int kTries = 4;
/// How often one flush follows the whole memory: it costs more than many puts.
constexpr int kPasses = 2;

constexpr double kNever = std::numeric_limits<double>::infinity();

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Outlives operations that a lost peer holds up.
struct UnderWay {
  RemoteKey key;
  Pending puts;
  Pending flush;
};

/// Packs and unpacks rows of @p length.
double copy_seconds(const std::byte* from, std::vector<std::byte>& staging,
                    std::vector<std::byte>& to, std::uint64_t length) {
  const auto start = Clock::now();
  for (std::uint64_t at = 0; at < staging.size(); at += length) {
    std::memcpy(staging.data() + at, from + at, length);
  }
  for (std::uint64_t at = 0; at < staging.size(); at += length) {
    std::memcpy(to.data() + at, staging.data() + at, length);
  }
  return seconds_since(start);
}

}  // namespace

std::uint64_t first_length_to_put(
    const std::function<std::optional<RowSeconds>(std::uint64_t length)>& measure) {
  std::uint64_t least = 2 * kMostPut;
  for (std::uint64_t length = kMostPut; length >= kLeastPut; length /= 2) {
    const std::optional<RowSeconds> seconds = measure(length);
    if (!seconds) {
      return length == kMostPut ? kUnmeasuredPut : least;
    }
    if (seconds->put > seconds->packed) {
      return least;
    }
    least = length;
  }
  return least;
}

PutProbe::PutProbe(const std::shared_ptr<const Context>& context) : memory_(context, 2 * kBytes) {}

std::uint64_t PutProbe::address() const { return reinterpret_cast<std::uintptr_t>(memory_.data()); }

std::uint64_t PutProbe::measure(Worker& worker, Peer& peer, std::uint64_t address,
                                const std::string& key, std::uint64_t chunk_bytes,
                                const std::function<bool()>& stop) const {
  const auto under_way = std::make_shared<UnderWay>();
  under_way->key = RemoteKey(peer.endpoint, key);
  std::byte* const source = memory_.data() + kBytes;
  std::memset(source, 1, kBytes);
  const auto put_seconds = [&](std::uint64_t length) -> std::optional<double> {
    const auto start = Clock::now();
    for (int pass = 0; pass < kPasses; ++pass) {
      for (std::uint64_t at = 0; at < kBytes; at += length) {
        worker.put(peer, {source + at, std::min(length, kBytes - at)}, memory_, address + at,
                   under_way->key, under_way->puts);
      }
    }
    worker.flush(peer, under_way->flush);
    while (under_way->puts.operations + under_way->flush.operations > 0) {
      if (worker.progress()) {
        continue;
      }
      if (peer.is_gone() || stop()) {
        return std::nullopt;
      }
      std::this_thread::yield();
    }
    const bool good = under_way->puts.status == UCS_OK && under_way->flush.status == UCS_OK;
    return good ? std::optional(seconds_since(start)) : std::nullopt;
  };
  std::vector<std::byte> staging(kBytes);
  std::vector<std::byte> destination(kBytes);
  const bool connected = put_seconds(kBytes).has_value();
  const auto start = Clock::now();
  const std::uint64_t length =
      first_length_to_put([&](std::uint64_t row) -> std::optional<RowSeconds> {
        if (!connected || Clock::now() - start > kBudget) {
          return std::nullopt;
        }
        RowSeconds best{kNever, kNever};
        for (int i = 0; i < kTries; ++i) {
          const std::optional<double> rows = put_seconds(row);
          const std::optional<double> chunks = rows ? put_seconds(chunk_bytes) : std::nullopt;
          if (!chunks) {
            return std::nullopt;
          }
          best.put = std::min(best.put, *rows);
          best.packed = std::min(
              best.packed, *chunks + kPasses * copy_seconds(source, staging, destination, row));
        }
        return best;
      });
  if (under_way->puts.operations + under_way->flush.operations > 0) {
    worker.keep(under_way);
  }
  return length;
}

}  // namespace m2n::ucx
