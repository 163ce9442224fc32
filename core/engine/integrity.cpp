// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/integrity.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "core/api/scales.hpp"
#include "core/error.hpp"
#include "core/tensor/digest.hpp"

namespace m2n {
namespace {

/// Boxes that are digested at a time: enough for one launch on a device to be worth it, few enough
/// for their list to be small.
constexpr std::size_t kBoxesAtOnce = 8192;

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

/// What a check's digest is multiplied with in a total: odd, so that no difference becomes 0.
std::uint64_t weight_of(std::uint64_t check) { return mix64(check + 1) | 1; }

[[noreturn]] void broken_measurement() {
  throw Error(Errc::bad_argument, "a rank sent a broken measurement");
}

/// Takes a list of totals off @p text: none, or one of each of @p classes.
std::vector<std::uint64_t> take_totals(std::string_view& text, std::uint64_t classes) {
  std::uint64_t count = 0;
  if (text.size() < sizeof count) {
    broken_measurement();
  }
  std::memcpy(&count, text.data(), sizeof count);
  text.remove_prefix(sizeof count);
  if ((count != 0 && count != classes) || text.size() / sizeof count < count) {
    broken_measurement();
  }
  std::vector<std::uint64_t> totals(count);
  if (count > 0) {
    std::memcpy(totals.data(), text.data(), count * sizeof count);
  }
  text.remove_prefix(count * sizeof count);
  return totals;
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
  classify(destination, geometry);
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

/// Gives each check the class of the ranks that hold its box. Every rank numbers classes alike: in
/// the order of parameters and boxes.
void Integrity::classify(const Layout& destination, Geometry& geometry) {
  std::vector<std::vector<Rank>> holders(geometry.checks.size());
  for (const RankPiece& entry : destination.pieces()) {
    const auto at =
        std::lower_bound(geometry.checks.begin(), geometry.checks.end(), entry.piece.box);
    holders[static_cast<std::size_t>(at - geometry.checks.begin())].push_back(entry.rank);
  }
  for (std::vector<Rank>& ranks : holders) {
    std::sort(ranks.begin(), ranks.end());
    const auto number = static_cast<std::uint32_t>(class_of_.size());
    geometry.classes.push_back(class_of_.emplace(std::move(ranks), number).first->second);
  }
}

void Integrity::measure(std::span<const std::size_t> parameters, Role role,
                        const std::vector<LocalBuffer>& bound, Measurement& out) const {
  const bool sent = role == Role::source;
  std::vector<Measurement::Entry>& entries = sent ? out.sent_ : out.held_;
  std::vector<DigestOf>& boxes = out.boxes_;
  std::size_t first = entries.size();
  const auto digest_them = [&] {
    for (const std::uint64_t sum : digests(boxes)) {
      entries[first++].sum = sum;
    }
    boxes.clear();
  };
  for (const std::size_t index : parameters) {
    const Parameter& parameter = problem_.parameters()[index];
    const Geometry& geometry = *of_parameter_[index];
    const auto& slots = problem_.buffers(role).of_parameter[index];
    const DType as = parameter.destination_dtype();
    for (const Part& part : sent ? geometry.sent : geometry.held) {
      DigestOf& one = boxes.emplace_back(
          DigestOf{{parameter.shape, part.box, sent ? parameter.source_dtype() : as,
                    bound[slots[part.view.buffer]].from(part.view.offset_bytes), part.view.strides},
                   as,
                   {}});
      if (sent && parameter.quantise) {
        one.scales =
            placed_scales(problem_, static_cast<std::uint32_t>(index), rank_, part.box, bound);
      }
      entries.push_back({first_check_[index] + part.check, 0});
      if (boxes.size() == kBoxesAtOnce) {
        digest_them();
      }
    }
  }
  digest_them();
}

void Integrity::measure_sent(std::span<const std::size_t> parameters,
                             const std::vector<LocalBuffer>& source, Measurement& out) const {
  measure(parameters, Role::source, source, out);
}

void Integrity::measure_held(std::span<const std::size_t> parameters,
                             const std::vector<LocalBuffer>& destination, Measurement& out) const {
  measure(parameters, Role::destination, destination, out);
}

void Integrity::Measurement::clear() {
  sent_.clear();
  held_.clear();
  boxes_.clear();
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
  if (text.size() < sizeof header) {
    broken_measurement();
  }
  std::memcpy(&header, text.data(), sizeof header);
  const std::uint64_t entries = (text.size() - sizeof header) / sizeof(Entry);
  if (header.sent > entries || header.held != entries - header.sent ||
      text.size() != sizeof header + entries * sizeof(Entry)) {
    broken_measurement();
  }
  std::vector<Entry> all(entries);
  if (entries > 0) {
    std::memcpy(all.data(), text.data() + sizeof header, entries * sizeof(Entry));
  }
  if (std::any_of(all.begin(), all.end(), [&](const Entry& e) { return e.check >= checks; })) {
    broken_measurement();
  }
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(header.sent);
  Measurement measurement;
  measurement.sent_.assign(all.begin(), middle);
  measurement.held_.assign(middle, all.end());
  return measurement;
}

/// [class] The weighted sum of @p entries.
std::vector<std::uint64_t> Integrity::totals_of(
    const std::vector<Measurement::Entry>& entries) const {
  std::vector<std::uint64_t> totals(class_of_.size(), 0);
  std::size_t parameter = 0;  // of the last entry; most come in order
  for (const Measurement::Entry& entry : entries) {
    if (entry.check < first_check_[parameter]) {
      parameter = 0;
    }
    while (entry.check >= first_check_[parameter + 1]) {
      ++parameter;
    }
    const std::uint32_t number =
        of_parameter_[parameter]->classes[entry.check - first_check_[parameter]];
    totals[number] += weight_of(entry.check) * entry.sum;
  }
  return totals;
}

std::string Integrity::totals(const Measurement& measurement) const {
  std::string out;
  for (const auto* const entries : {&measurement.sent_, &measurement.held_}) {
    if (entries->empty()) {
      append(out, std::uint64_t{0});
      continue;
    }
    const std::vector<std::uint64_t> totals = totals_of(*entries);
    append(out, static_cast<std::uint64_t>(totals.size()));
    for (const std::uint64_t total : totals) {
      append(out, total);
    }
  }
  return out;
}

bool Integrity::totals_agree(const std::vector<std::string>& by_rank) const {
  std::vector<std::uint64_t> expected(class_of_.size(), 0);
  std::vector<std::vector<std::uint64_t>> held(by_rank.size());
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::string_view text = by_rank[rank];
    const std::vector<std::uint64_t> sent = take_totals(text, expected.size());
    held[rank] = take_totals(text, expected.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      expected[i] += sent[i];
    }
  }
  for (const auto& [holders, number] : class_of_) {
    for (auto rank = holders.begin(); rank != holders.end();) {
      const auto next = std::upper_bound(rank, holders.end(), *rank);
      const auto times = static_cast<std::uint64_t>(next - rank);
      const auto& totals = held.at(static_cast<std::size_t>(*rank));
      if ((totals.empty() ? 0 : totals[number]) != times * expected[number]) {
        return false;
      }
      rank = next;
    }
  }
  return true;
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
