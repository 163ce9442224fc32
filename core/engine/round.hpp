// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// One rank's rounds: direct parameters first, then full tensors group by group in a pool of
/// bounded size, while load_weights() asks for them.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/api/sink.hpp"
#include "core/api/source.hpp"
#include "core/api/transport.hpp"
#include "core/plan/plan.hpp"

namespace m2n {

/// When each parameter of a problem comes. Group 0 is everything that lands in place. Full tensors
/// follow in declared order, a group at a time; tensors of one Resolution::together share a group.
struct RoundGroups {
  std::vector<std::uint32_t> group_of;  ///< [parameter]
  std::vector<std::uint64_t> bytes;     ///< [group] room for its full tensors, 0 for group 0.

  std::uint32_t count() const { return static_cast<std::uint32_t>(bytes.size()); }
  std::uint64_t largest_bytes() const;
};

/// The same on every rank. A group is larger than @p pool_bytes only when it cannot be parted.
RoundGroups round_groups(const Problem& problem, const std::vector<Resolution>& resolutions,
                         std::uint64_t pool_bytes);

/// The parts of @p program, which is a rank's of @p plan, by group: each a program of its own, with
/// a digest of its own. A group in which nothing moves on any rank has none (stage_count 0).
std::vector<Program> split_program(const Program& program, const Plan& plan,
                                   const RoundGroups& groups);

struct RoundLimits {
  /// Of full tensors at a time, on every rank alike: it decides the groups.
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;
  /// What this rank can spare. A plan that needs more is refused before anything moves. 0:
  /// anything.
  std::uint64_t budget_bytes = 0;
};

/// What a rank brings to its rounds; null where it is no trainer or no worker.
struct RoundParts {
  WeightSource* source = nullptr;
  WeightSink* sink = nullptr;
};

/// Sees each full tensor of parameter @p index while its bytes are there.
using FullTensorVisitor = std::function<void(std::size_t index, const FullTensor& tensor)>;

/// A rank's plan over its buffers, ready to run. The steps of a round, on every rank:
/// source borrow() or sink begin(), a barrier, run(), sink accept(), a barrier, sink commit();
/// on an error abort(), and sink roll_back().
///
/// - Collective: prepare() and run(), by every rank of the transport's group.
/// - Threads: one at a time; abort() from any thread once prepare() has returned.
/// - Memory: the pool, as large as the largest group of this rank, where the sink's weights live,
///   from the first to the last round. Parts outlive this.
/// - Streams: see Session.
/// - Errors: Error{bad_argument} naming parameter and rank, before a byte moves; TransportError.
class PreparedRound {
 public:
  /// Checks what source and sink lend, and makes room for full tensors. Talks to nobody.
  /// @param version  Of the first round, for the source.
  PreparedRound(const Problem& problem, const Plan& plan,
                const std::vector<Resolution>& resolutions, Rank rank, const RoundParts& parts,
                const RoundLimits& limits, std::uint64_t version);
  ~PreparedRound();
  PreparedRound(const PreparedRound&) = delete;
  PreparedRound& operator=(const PreparedRound&) = delete;

  /// @throws Error{bad_argument} naming the first buffer of this rank whose memory @p transport
  /// does
  ///         not move. prepare() asks too; before it, a rank can tell the others.
  void require_memory(const Transport& transport) const;
  void prepare(Transport& transport, Deadline deadline);

  /// Moves everything, and hands full tensors to the sink's load_weights(), called once.
  /// @param deadline  Of each group.
  /// @param visit  May be empty.
  RoundReport run(std::uint64_t version, std::chrono::milliseconds deadline,
                  const FullTensorVisitor& visit = {});
  void abort() noexcept;

  /// Of the direct parameters; those of full tensors hold the group that came last.
  const Buffers& buffers() const;
  std::uint64_t pool_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace m2n
