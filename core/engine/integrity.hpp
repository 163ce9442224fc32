// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The digests of a round: what the trainers sent and what the workers hold, summed and compared
/// without gathering anything.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/api/buffers.hpp"
#include "core/api/memory.hpp"
#include "core/plan/problem.hpp"

namespace m2n {

/// One check is one distinct box of one parameter on the destination side: every worker that holds
/// the box must have the digest that the trainers' parts of it add up to, after the cast. Of an
/// element that several trainers hold, the lowest rank's copy counts.
///
/// Checks that the same ranks hold form a class. Of each class a rank states one number: the sum of
/// its digests, each times an odd number of its own. What the trainers state must add up to what
/// every holder states. One wrong digest always shows; several hide each other about once in 2^63.
/// Only when numbers differ does a rank state every digest, so that what is wrong can be named.
///
/// - Threads: const members from any thread.
/// - Memory: reads buffers during the calls, each in the memory that it lies in.
class Integrity final {
 public:
  /// What one rank measured in one round. Keeps its memory from round to round.
  class Measurement {
   public:
    void clear();
    std::string text() const;  ///< For compare(): 16 bytes a digest.

   private:
    friend class Integrity;
    struct Entry {
      std::uint64_t check = 0;
      std::uint64_t sum = 0;
    };
    std::vector<Entry> sent_;
    std::vector<Entry> held_;
    std::vector<DigestOf> boxes_;  // that are digested next
  };

  /// What @p rank has to measure. Cost: the pieces of every distinct pair of layouts, once.
  /// @param problem  A loan for the lifetime of this.
  Integrity(const Problem& problem, Rank rank);

  /// Parts of @p parameters that this rank sends, and that it holds, from its bound buffers.
  void measure_sent(std::span<const std::size_t> parameters, const std::vector<LocalBuffer>& source,
                    Measurement& out) const;
  void measure_held(std::span<const std::size_t> parameters,
                    const std::vector<LocalBuffer>& destination, Measurement& out) const;

  /// What @p measurement comes to, for totals_agree(): at most 16 bytes a class.
  std::string totals(const Measurement& measurement) const;
  /// @param by_rank  One text of totals() a rank of the world.
  /// @throws Error{bad_argument} for a text that is none.
  bool totals_agree(const std::vector<std::string>& by_rank) const;

  /// Compares what all ranks measured. @param by_rank  One text a rank of the world.
  /// @return One sentence naming the first wrong parameters, boxes and ranks; empty when all agree.
  /// @throws Error{bad_argument} for a text that is none.
  std::string compare(const std::vector<std::string>& by_rank) const;

  std::uint64_t check_count() const noexcept { return check_count_; }

 private:
  /// A part of a piece of this rank, and the check that it belongs to.
  struct Part {
    std::uint32_t check = 0;  ///< Among those of the parameter.
    Box box;
    View view;
  };
  struct Geometry {
    std::vector<Box> checks;
    std::vector<std::uint32_t> classes;  ///< [check]
    std::vector<Part> sent;
    std::vector<Part> held;
  };

  const Geometry& geometry_of(const Parameter& parameter);
  void classify(const Layout& destination, Geometry& geometry);
  std::vector<std::uint64_t> totals_of(const std::vector<Measurement::Entry>& entries) const;
  void measure(std::span<const std::size_t> parameters, Role role,
               const std::vector<LocalBuffer>& bound, Measurement& out) const;
  static Measurement parse(std::string_view text, std::uint64_t checks);

  const Problem& problem_;
  Rank rank_;
  std::unordered_map<std::string, Geometry> geometries_;
  std::vector<const Geometry*> of_parameter_;
  std::map<std::vector<Rank>, std::uint32_t> class_of_;  ///< By holders, once a piece; ascending.
  std::vector<std::uint64_t> first_check_;               ///< [parameter], then the count.
  std::uint64_t check_count_ = 0;
};

}  // namespace m2n
