// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Lanes: which holders may serve which receivers of a class, and how much each holder serves.

#include <cstdint>
#include <vector>

#include "core/api/planner.hpp"
#include "core/plan/flow_classes.hpp"

namespace m2n {

/// Copies of a class that some holders share. Each copy is the class's bytes in parameter order.
struct Lane {
  std::uint32_t class_number = 0;
  std::vector<Rank> holders;         ///< Sorted.
  std::vector<Rank> receivers;       ///< Sorted. One copy a receiver, or one copy for them all.
  std::vector<std::uint32_t> ports;  ///< [holder] the port by which it sends.
};

/// One lane a class: every holder may serve every receiver.
std::vector<Lane> whole_lanes(const FlowClasses& classes);

/// Receivers with a holder in their island are served over links, by the holders there, in a lane
/// an island; the others over NICs, by any holder, in one lane for all islands or in one each.
std::vector<Lane> island_lanes(const FlowClasses& classes, const Ports& ports,
                               bool far_islands_apart = false);

/// A stretch of an atom, in bytes from its begin, and who sends it (an index into lane.holders).
struct LanePart {
  std::uint32_t holder = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Decides who sends what. Copy c of a lane is for receivers[c].
class Splitter {
 public:
  Splitter() = default;
  Splitter(const Splitter&) = delete;
  Splitter& operator=(const Splitter&) = delete;
  virtual ~Splitter() = default;

  /// Positions in a geometry's parameter list where another pattern begins, ascending, without 0.
  virtual std::vector<std::size_t> cuts(std::uint32_t geometry) const;
  /// Parts of an atom that cover its @p bytes in order. @p offset  Of the atom in its class, within
  /// @p parameter. Appends to @p out.
  virtual void split(std::uint32_t lane, std::uint32_t copy, std::uint32_t parameter,
                     std::uint64_t offset, std::uint64_t bytes,
                     std::vector<LanePart>& out) const = 0;
};

/// Quotas by an exact min-max flow over the ports, each filled in parameter order: copy after copy,
/// and in a copy parameter after parameter. So a holder serves long runs, most receivers have one
/// holder, and a geometry needs few patterns.
class QuotaSplitter final : public Splitter {
 public:
  /// @param one_copy  A lane is one copy, however many receivers it has.
  QuotaSplitter(const FlowClasses& classes, const std::vector<Lane>& lanes, const Ports& ports,
                bool one_copy);

  std::vector<std::size_t> cuts(std::uint32_t geometry) const override;
  void split(std::uint32_t lane, std::uint32_t copy, std::uint32_t parameter, std::uint64_t offset,
             std::uint64_t bytes, std::vector<LanePart>& out) const override;

  /// The bytes [begin, end) of a class, in parameter order, that one holder of @p lane serves, and
  /// that contain byte @p at. @pre made for one copy
  struct Stretch {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };
  Stretch stretch(std::uint32_t lane, std::uint64_t at) const;

 private:
  /// Where the next holder takes over inside a copy.
  struct Boundary {
    std::uint32_t copy = 0;
    std::uint32_t parameter = 0;
    std::uint64_t offset = 0;  // in the parameter's part of the class
    std::uint32_t holder = 0;  // from here on
    std::uint64_t at = 0;      // in the lane: copy after copy
  };
  struct Filled {
    std::uint64_t bytes = 0;                  // of all copies
    std::vector<std::uint32_t> first_holder;  // [copy]
    std::vector<Boundary> boundaries;
  };
  const FlowClasses& classes_;
  std::vector<Filled> filled_;                                     // [lane]
  std::vector<std::vector<std::pair<std::uint32_t, bool>>> cuts_;  // [geometry] parameter, inside
};

/// Adds one pattern for each geometry and stretch between cuts, in which every receiver gets what
/// it needs straight from holders; what it holds itself it copies. A rank's second holding of a
/// box is copied from its first, one stage later.
void add_direct(PlanBuilder& builder, const FlowClasses& classes, const std::vector<Lane>& lanes,
                const Splitter& splitter);

/// The part of @p box that lies at bytes [begin, end) of @p bytes, rounded to whole slices across
/// the longest dimension. Empty when nothing is left.
std::optional<Box> slice(const Box& box, std::uint64_t begin, std::uint64_t end,
                         std::uint64_t bytes);

/// @p options' number under @p key, or @p otherwise. @throws Error{usage} unless it is 1 or more.
std::uint64_t positive_option(std::string_view who, const Options& options, std::string_view key,
                              std::uint64_t otherwise);
/// @p options' word under @p key, or the first of @p choices. @throws Error{usage} for another.
std::string choice_option(std::string_view who, const Options& options, std::string_view key,
                          std::initializer_list<std::string_view> choices);

}  // namespace m2n
