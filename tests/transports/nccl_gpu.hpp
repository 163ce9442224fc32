// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What the tests of the NCCL transport on GPUs share. Bodies of ranks throw what is wrong; cases
/// assert.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/api/builtin.hpp"
#include "tests/transports/nccl_random_copy.hpp"
#include "tests/transports/nccl_world.hpp"
#include "transports/nccl/device.hpp"

namespace m2n::nccl {

using testing::Bytes;

/// A minute from now: no round of a test takes so long.
inline Deadline soon() { return deadline_in(std::chrono::seconds(60)); }

void require(bool ok, const std::string& what);
/// Word @p n of a text with single blanks.
std::string word(const std::string& text, std::size_t n);

/// A transport, as the program makes it.
std::unique_ptr<Transport> make(const Options& options, const std::string& name = "nccl");
/// Makes the device of @p rank current: the rank modulo the number of devices.
int select_device(Rank rank);

/// Runs @p body once a rank, each in a thread of its own. By rank, what it threw, or nothing.
std::vector<std::string> run_threads(Rank count, const std::function<void(Group&)>& body);
void none_failed(const std::vector<std::string>& failures);

/// Runs a body of rank_bodies() in @p count processes. @param apart  Each with its own NCCL_HOSTID.
void ranks_succeed(Rank count, const std::string& body, const std::string& argument, bool apart);

/// Puts @p body into rank_bodies() before main() begins.
struct RankBodyEntry {
  RankBodyEntry(const std::string& name, testing::RankBody body) {
    testing::rank_bodies()[name] = std::move(body);
  }
};

/// A copy of @p bytes in memory of the current device, @p shift bytes behind an aligned address.
class OnDevice {
 public:
  OnDevice() = default;
  explicit OnDevice(const Bytes& bytes, std::uint64_t shift = 0);
  std::byte* data() const { return memory_.data() + shift_; }
  void write(const Bytes& bytes);
  Bytes read() const;
  LocalBuffer buffer() const;

 private:
  DeviceMemory memory_;
  std::uint64_t bytes_ = 0;
  std::uint64_t shift_ = 0;
  int device_ = 0;
};

/// One tensor of i64 from rank 0 to every other rank.
struct Simple {
  Problem problem;
  Plan plan;
  Index elements;

  static Simple make(Index elements, Rank ranks);
  /// Buffers of a rank whose one tensor is @p buffer.
  static Buffers buffers(Rank rank, const LocalBuffer& buffer);
};

/// first, first + 1, ... as i64.
Bytes numbers(Index elements, std::int64_t first);

/// Rounds of @p c with changing values on the calling rank. Throws when bytes differ.
void simple_rounds(Group& group, const Simple& c, const Options& options, int rounds,
                   const std::string& transport = "nccl");

/// Bytes of the current device that are not free.
std::uint64_t memory_in_use();

}  // namespace m2n::nccl
