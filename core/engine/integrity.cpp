// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/integrity.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "core/api/memory.hpp"
#include "core/error.hpp"

namespace m2n {
namespace {

/// Mismatches that a message lists.
constexpr std::size_t kListed = 4;

/// What a rank measured: its entries as a sender, then as a holder.
struct Header {
  std::uint64_t sent = 0;
  std::uint64_t held = 0;
};

template <class Value>
void append(std::string& out, const Value& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// The parts of @p rank's pieces whose elements no piece before them has.
std::vector<Piece> owned_pieces(const Layout& layout, Rank rank) {
  const std::span<const RankPiece> all = layout.pieces();
  std::set<Box> seen;
  std::vector<Piece> owned;
  const std::uint64_t item = bytes_of(layout.dtype());
  for (std::size_t i = 0; i < all.size() && all[i].rank <= rank; ++i) {
    const Piece& piece = all[i].piece;
    if (!seen.insert(piece.box).second || all[i].rank != rank) {
      continue;
    }
    std::vector<Box> parts{piece.box};
    for (std::size_t j = 0; j < i && !parts.empty(); ++j) {
      std::vector<Box> left;
      for (const Box& part : parts) {
        subtract(part, all[j].piece.box, left);
      }
      parts = std::move(left);
    }
    for (const Box& part : parts) {
      owned.push_back({part, narrow(piece, part, item)});
    }
  }
  return owned;
}

std::uint64_t first_word(const void* pointer) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace

Integrity::Integrity(const Problem& problem, Rank rank) : problem_(problem), rank_(rank) {
  for (const Parameter& parameter : problem.parameters()) {
    const Geometry& geometry = geometry_of(parameter);
    of_parameter_.push_back(&geometry);
    first_check_.push_back(check_count_);
    check_count_ += geometry.checks.size();
  }
  first_check_.push_back(check_count_);
}

const Integrity::Geometry& Integrity::geometry_of(const Parameter& parameter) {
  const Layout& source = *parameter.source.layout;
  const Layout& destination = *parameter.destination.layout;
  const std::string key =
      std::to_string(first_word(&source)) + " " + std::to_string(first_word(&destination));
  const auto [found, fresh] = geometries_.try_emplace(key);
  Geometry& geometry = found->second;
  if (!fresh) {
    return geometry;
  }
  std::set<Box> boxes;
  for (const RankPiece& entry : destination.pieces()) {
    boxes.insert(entry.piece.box);
  }
  geometry.checks.assign(boxes.begin(), boxes.end());
  for (const RankPiece& entry : destination.pieces_of(rank_)) {
    const auto at =
        std::lower_bound(geometry.checks.begin(), geometry.checks.end(), entry.piece.box);
    geometry.held.push_back({static_cast<std::uint32_t>(at - geometry.checks.begin()),
                             entry.piece.box, entry.piece.view});
  }
  const std::uint64_t item = bytes_of(source.dtype());
  for (const Piece& piece : owned_pieces(source, rank_)) {
    for (std::uint32_t check = 0; check < geometry.checks.size(); ++check) {
      if (const auto common = intersect(piece.box, geometry.checks[check])) {
        geometry.sent.push_back({check, *common, narrow(piece, *common, item)});
      }
    }
  }
  return geometry;
}

void Integrity::measure(std::span<const std::size_t> parameters, Role role,
                        const std::vector<LocalBuffer>& bound,
                        std::vector<Measurement::Entry>& out) const {
  std::vector<DigestOf> boxes;
  const std::size_t first = out.size();
  for (const std::size_t index : parameters) {
    const Parameter& parameter = problem_.parameters()[index];
    const Geometry& geometry = *of_parameter_[index];
    const bool sent = role == Role::source;
    const auto& slots = problem_.buffers(role).of_parameter[index];
    for (const Part& part : sent ? geometry.sent : geometry.held) {
      boxes.push_back(
          {{parameter.shape, part.box,
            sent ? parameter.source_dtype() : parameter.destination_dtype(),
            bound[slots[part.view.buffer]].from(part.view.offset_bytes), part.view.strides},
           parameter.destination_dtype()});
      out.push_back({first_check_[index] + part.check, 0});
    }
  }
  const std::vector<std::uint64_t> sums = digests(boxes);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    out[first + i].sum = sums[i];
  }
}

void Integrity::measure_sent(std::span<const std::size_t> parameters,
                             const std::vector<LocalBuffer>& source, Measurement& out) const {
  measure(parameters, Role::source, source, out.sent_);
}

void Integrity::measure_held(std::span<const std::size_t> parameters,
                             const std::vector<LocalBuffer>& destination, Measurement& out) const {
  measure(parameters, Role::destination, destination, out.held_);
}

std::string Integrity::Measurement::text() const {
  std::string out;
  out.reserve(sizeof(Header) + (sent_.size() + held_.size()) * sizeof(Entry));
  append(out, Header{sent_.size(), held_.size()});
  for (const std::vector<Entry>* const entries : {&sent_, &held_}) {
    for (const Entry& entry : *entries) {
      append(out, entry);
    }
  }
  return out;
}

Integrity::Measurement Integrity::parse(std::string_view text, std::uint64_t checks) {
  using Entry = Measurement::Entry;
  Header header;
  const auto broken = [] { throw Error(Errc::bad_argument, "a rank sent a broken measurement"); };
  if (text.size() < sizeof header) {
    broken();
  }
  std::memcpy(&header, text.data(), sizeof header);
  const std::uint64_t entries = (text.size() - sizeof header) / sizeof(Entry);
  if (header.sent > entries || header.held != entries - header.sent ||
      text.size() != sizeof header + entries * sizeof(Entry)) {
    broken();
  }
  std::vector<Entry> all(entries);
  if (entries > 0) {
    std::memcpy(all.data(), text.data() + sizeof header, entries * sizeof(Entry));
  }
  if (std::any_of(all.begin(), all.end(), [&](const Entry& e) { return e.check >= checks; })) {
    broken();
  }
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(header.sent);
  Measurement measurement;
  measurement.sent_.assign(all.begin(), middle);
  measurement.held_.assign(middle, all.end());
  return measurement;
}

std::string Integrity::compare(const std::vector<std::string>& by_rank) const {
  std::vector<std::uint64_t> expected(check_count_, 0);
  std::vector<std::vector<Measurement::Entry>> held(by_rank.size());
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    Measurement measurement = parse(by_rank[rank], check_count_);
    for (const Measurement::Entry& entry : measurement.sent_) {
      expected[entry.check] += entry.sum;
    }
    held[rank] = std::move(measurement.held_);
  }
  std::string text;
  std::size_t wrong = 0;
  for (std::size_t rank = 0; rank < held.size(); ++rank) {
    for (const Measurement::Entry& entry : held[rank]) {
      if (entry.sum == expected[entry.check] || ++wrong > kListed) {
        continue;
      }
      const auto after = std::upper_bound(first_check_.begin(), first_check_.end(), entry.check);
      const auto parameter = static_cast<std::size_t>(after - first_check_.begin()) - 1;
      text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
              " holds other values than the trainers in box " +
              to_string(of_parameter_[parameter]->checks[entry.check - first_check_[parameter]]) +
              " of parameter '" + problem_.parameters()[parameter].name + "'";
    }
  }
  return wrong > kListed ? text + "; and " + std::to_string(wrong - kListed) + " more" : text;
}

}  // namespace m2n
