// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/plan/plan_builder.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

constexpr std::uint32_t kUnassigned = std::numeric_limits<std::uint32_t>::max();

struct LayoutPair {
  const Layout* source;
  const Layout* destination;
};
struct LayoutPairHash {
  std::size_t operator()(const LayoutPair& pair) const noexcept {
    return mix64(pair.source->fingerprint() ^ mix64(pair.destination->fingerprint()));
  }
};
/// Equal content counts as equal, also when two sources made a layout twice.
struct LayoutPairEqual {
  bool operator()(const LayoutPair& a, const LayoutPair& b) const {
    return (a.source == b.source || *a.source == *b.source) &&
           (a.destination == b.destination || *a.destination == *b.destination);
  }
};

void append_raw(std::string& out, std::uint64_t word) {
  static_assert(std::endian::native == std::endian::little, "digests are over little-endian words");
  out.append(reinterpret_cast<const char*>(&word), sizeof word);
}

void append_raw(std::string& out, const Box& box) {
  append_raw(out, box.rank());
  for (std::size_t d = 0; d < box.rank(); ++d) {
    append_raw(out, static_cast<std::uint64_t>(box.lo[d]));
    append_raw(out, static_cast<std::uint64_t>(box.hi[d]));
  }
}

std::string digest_of(const Pattern& pattern, const std::string& source_digest,
                      const std::string& destination_digest) {
  std::string text = source_digest + '\n' + destination_digest + '\n';
  text.reserve(text.size() + (pattern.boxes.size() + pattern.scratch.size()) * 80 +
               pattern.moves.size() * sizeof(Move) + 16);
  append_raw(text, pattern.boxes.size());
  for (const Box& box : pattern.boxes) {
    append_raw(text, box);
  }
  append_raw(text, pattern.moves.size());
  static_assert(std::has_unique_object_representations_v<Move>);
  text.append(reinterpret_cast<const char*>(pattern.moves.data()),
              pattern.moves.size() * sizeof(Move));
  for (const ScratchPiece& piece : pattern.scratch) {
    append_raw(text, static_cast<std::uint64_t>(piece.rank));
    append_raw(text, piece.box);
    append_raw(text, piece.offset_bytes);
  }
  return sha256_hex(text);
}

}  // namespace

std::vector<GeometryGroup> group_by_geometry(const Problem& problem) {
  std::vector<GeometryGroup> groups;
  std::unordered_map<LayoutPair, std::size_t, LayoutPairHash, LayoutPairEqual> number;
  const auto& parameters = problem.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& source = parameters[i].source.layout;
    const auto& destination = parameters[i].destination.layout;
    const auto [at, added] =
        number.emplace(LayoutPair{source.get(), destination.get()}, groups.size());
    if (added) {
      groups.push_back({{source, destination}, {}});
    }
    groups[at->second].parameters.push_back(static_cast<std::uint32_t>(i));
  }
  return groups;
}

Atoms make_atoms(const Problem& problem, const GeometryGroup& group) {
  try {
    return Atoms(group.geometry);
  } catch (const Error& error) {
    throw Error(error.code(), "parameter '" + problem.parameters()[group.parameters.front()].name +
                                  "': " + error.what());
  }
}

PlanBuilder::PlanBuilder(const Problem& problem, std::string planner, std::optional<Rank> only)
    : problem_(problem), only_(only) {
  expects(problem.parameters().size() < kUnassigned, "fewer than 2^32 - 1 parameters");
  plan_.planner = std::move(planner);
  plan_.pattern_of.assign(problem.parameters().size(), kUnassigned);
  plan_.first_stage.assign(problem.parameters().size(), 0);
}

const std::string& PlanBuilder::layout_digest(const Layout& layout) {
  std::string& digest = layout_digests_[&layout];
  if (digest.empty()) {
    digest = sha256_hex(layout.canonical_json());
  }
  return digest;
}

std::uint32_t PlanBuilder::add(Pattern pattern) {
  const auto earlier = [](const Move& a, const Move& b) { return a.stage < b.stage; };
  if (!std::is_sorted(pattern.moves.begin(), pattern.moves.end(), earlier)) {
    std::stable_sort(pattern.moves.begin(), pattern.moves.end(), earlier);
  }
  pattern_stages_.push_back(pattern.moves.empty() ? 0 : pattern.moves.back().stage + 1);
  pattern_digests_.push_back(digest_of(pattern, layout_digest(*pattern.geometry.source),
                                       layout_digest(*pattern.geometry.destination)));
  if (only_) {
    const std::vector<bool> own = pattern.holdings_of(*only_);
    std::vector<Move> kept;
    std::copy_if(pattern.moves.begin(), pattern.moves.end(), std::back_inserter(kept),
                 [&](const Move& move) { return own[move.from] || own[move.to]; });
    pattern.moves = std::move(kept);
  }
  plan_.patterns.push_back(std::move(pattern));
  return static_cast<std::uint32_t>(plan_.patterns.size() - 1);
}

void PlanBuilder::assign(std::uint32_t parameter, std::uint32_t pattern,
                         std::uint32_t first_stage) {
  expects(parameter < plan_.pattern_of.size(), "a parameter of the problem");
  expects(pattern < plan_.patterns.size(), "a pattern that was added");
  expects(plan_.pattern_of[parameter] == kUnassigned, "a parameter that is assigned only once");
  plan_.pattern_of[parameter] = pattern;
  plan_.first_stage[parameter] = first_stage;
  plan_.stage_count = std::max(plan_.stage_count, first_stage + pattern_stages_[pattern]);
}

Plan PlanBuilder::finish() && {
  std::string text = plan_.planner + '\n';
  for (const std::string& digest : pattern_digests_) {
    text += digest + '\n';
  }
  for (std::size_t i = 0; i < plan_.pattern_of.size(); ++i) {
    const Parameter& parameter = problem_.parameters()[i];
    if (plan_.pattern_of[i] == kUnassigned) {
      throw Error(Errc::bad_plan, "planner '" + plan_.planner + "' left out parameter '" +
                                      parameter.name + "'; every parameter needs a pattern");
    }
    text += parameter.name;
    text += '\0';
    for (const Side* side : {&parameter.source, &parameter.destination}) {
      for (const std::string& buffer : side->buffers) {
        text += buffer;
        text += '\0';
      }
      text += '\1';
    }
    if (parameter.quantise) {
      text += to_string(parameter.quantise->blocks);
      text += parameter.quantise->scales;
      text += '\2';
    }
    append_raw(text, plan_.pattern_of[i] | std::uint64_t{plan_.first_stage[i]} << 32);
  }
  plan_.digest = sha256_hex(text);
  return std::move(plan_);
}

}  // namespace m2n
