// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/io/dump_diff.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"

namespace m2n {
namespace {

/// Facts that differ between any two runs.
const std::set<std::string, std::less<>> kIncidental = {"created_utc", "run_id", "command_line"};
/// Facts up to this long are shown.
constexpr std::size_t kComparedBytes = 60;

class FileComparison {
 public:
  FileComparison(const std::filesystem::path& a, const std::filesystem::path& b) : a_(a), b_(b) {}

  DumpComparison run() {
    compare_facts();
    const std::optional<Problem> problem_a = problem_of(a_);
    const std::optional<Problem> problem_b = problem_of(b_);
    if (only_one("parameters", "the problem", problem_a.has_value(), problem_b.has_value()) &&
        problem_a) {
      compare_parameters(*problem_a, *problem_b);
    }
    if (only_one("plan", "the plan", a_.has("/plan/bytes"), b_.has("/plan/bytes")) &&
        a_.has("/plan/bytes")) {
      compare_plans();
      compare_traffic();
    }
    for (const Role side : {Role::source, Role::destination}) {
      const DumpTensors tensors_a(a_.file(), side);
      const DumpTensors tensors_b(b_.file(), side);
      if (!tensors_a.catalogue().empty() && !tensors_b.catalogue().empty()) {
        compare_tensors(tensors_a, tensors_b, out_);
      } else if (problem_a && problem_b) {
        compare_digests(side, *problem_a, *problem_b);
      }
    }
    return std::move(out_);
  }

 private:
  void differ(std::string section, std::string subject, std::string text) {
    out_.differences.push_back({std::move(section), std::move(subject), std::move(text)});
  }

  /// Tells when just one dump has something. @return true when there is nothing to tell.
  bool only_one(const std::string& section, const std::string& subject, bool in_a, bool in_b) {
    if (in_a != in_b) {
      differ(section, subject, in_a ? "only in the first" : "only in the second");
    }
    return in_a == in_b;
  }

  static std::optional<Problem> problem_of(const DumpReader& dump) {
    return dump.has("/params/name") && dump.has("/layouts/json") ? std::optional(dump.problem())
                                                                 : std::nullopt;
  }

  void compare_facts() {
    const auto facts_a = a_.facts();
    const auto facts_b = b_.facts();
    std::set<std::string> keys;
    for (const auto* facts : {&facts_a, &facts_b}) {
      for (const auto& fact : *facts) {
        keys.insert(fact.first);
      }
    }
    for (const std::string& key : keys) {
      if (kIncidental.contains(key)) {
        continue;
      }
      ++out_.facts;
      const auto in_a = facts_a.find(key);
      const auto in_b = facts_b.find(key);
      if (only_one("experiment", key, in_a != facts_a.end(), in_b != facts_b.end()) &&
          in_a->second != in_b->second) {
        differ("experiment", key, difference_of(in_a->second, in_b->second));
      }
    }
  }

  static std::string difference_of(const std::string& a, const std::string& b) {
    const auto shown = [](const std::string& text) {
      return text.size() <= kComparedBytes && text.find('\n') == text.npos;
    };
    if (shown(a) && shown(b)) {
      return "'" + a + "' and '" + b + "'";
    }
    const auto at = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
    const auto line = 1 + std::count(a.begin(), at, '\n');
    return std::to_string(a.size()) + " and " + std::to_string(b.size()) +
           " bytes of text that differ from line " + std::to_string(line) + ", byte " +
           std::to_string(at - a.begin()) + " on";
  }

  void compare_parameters(const Problem& a, const Problem& b) {
    std::unordered_map<std::string, std::size_t> numbers;
    for (std::size_t i = 0; i < b.parameters().size(); ++i) {
      numbers.emplace(b.parameters()[i].name, i);
    }
    bool moved = false;
    std::set<std::string> seen;
    for (std::size_t i = 0; i < a.parameters().size(); ++i) {
      const Parameter& one = a.parameters()[i];
      const std::string subject = "'" + one.name + "'";
      ++out_.parameters;
      seen.insert(one.name);
      const auto found = numbers.find(one.name);
      if (found == numbers.end()) {
        differ("parameters", subject, "only in the first");
        continue;
      }
      moved = moved || found->second != i;
      const Parameter& other = b.parameters()[found->second];
      if (one.shape != other.shape) {
        differ("parameters", subject,
               "has shape " + to_string(one.shape) + " and " + to_string(other.shape));
        continue;
      }
      if (one.cast != other.cast) {
        differ("parameters", subject, "is cast in one of them only");
      }
      const auto said = [](const Parameter& p) {
        return p.quantise ? to_string(p.quantise->blocks) + " under '" + p.quantise->scales + "'"
                          : std::string("nowhere");
      };
      if (said(one) != said(other)) {
        differ("parameters", subject,
               "is quantised in blocks " + said(one) + " and " + said(other));
      }
      compare_sides(subject, "source", one.source, other.source);
      compare_sides(subject, "destination", one.destination, other.destination);
    }
    for (const Parameter& other : b.parameters()) {
      if (!seen.contains(other.name)) {
        differ("parameters", "'" + other.name + "'", "only in the second");
      }
    }
    if (moved) {
      differ("parameters", "their order", "is another");
    }
  }

  void compare_sides(const std::string& subject, const std::string& side, const Side& a,
                     const Side& b) {
    if (a.layout->dtype() != b.layout->dtype()) {
      differ("parameters", subject,
             side + " has dtype " + std::string(to_string(a.layout->dtype())) + " and " +
                 std::string(to_string(b.layout->dtype())));
    } else if (!(*a.layout == *b.layout)) {
      differ("parameters", subject,
             side + " has layout " + short_text(*a.layout) + " and " + short_text(*b.layout));
    }
    if (a.buffers != b.buffers) {
      differ("parameters", subject, side + " lies in other buffers");
    }
  }

  static std::string short_text(const Layout& layout) {
    const std::string json = layout.canonical_json();
    return json.size() <= 2 * kComparedBytes
               ? json
               : std::to_string(layout.pieces().size()) + " pieces over " +
                     std::to_string(layout.ranks().size()) + " ranks";
  }

  /// Row by row, in the order of /plan.
  void compare_plans() {
    const auto columns_of = [](const DumpReader& dump) {
      std::map<std::string, std::vector<std::byte>> out;
      for (const char* name :
           {"parameter", "stage", "source", "destination", "source_role", "destination_role",
            "source_holding", "destination_holding", "lo", "hi", "bytes"}) {
        const std::string path = std::string("/plan/") + name;
        dump.verify(path);
        out.emplace(path, dump.bytes(path));
      }
      return out;
    };
    const auto columns_a = columns_of(a_);
    const auto columns_b = columns_of(b_);
    const std::size_t rows_a = columns_a.at("/plan/bytes").size() / sizeof(std::uint64_t);
    const std::size_t rows_b = columns_b.at("/plan/bytes").size() / sizeof(std::uint64_t);
    out_.regions += std::max(rows_a, rows_b);
    const std::size_t rows = std::min(rows_a, rows_b);
    std::vector<bool> differs(rows, false);
    bool same_width = true;
    for (const auto& [path, bytes] : columns_a) {
      const std::vector<std::byte>& others = columns_b.at(path);
      const std::size_t width = rows_a == 0 ? 0 : bytes.size() / rows_a;
      same_width = same_width && (rows == 0 || width == others.size() / rows_b);
      for (std::size_t i = 0; i < rows && same_width; ++i) {
        differs[i] = differs[i] ||
                     std::memcmp(bytes.data() + i * width, others.data() + i * width, width) != 0;
      }
    }
    const auto wrong = std::count(differs.begin(), differs.end(), true);
    if (!same_width) {
      differ("plan", "regions", "have boxes of another largest rank");
    } else if (rows_a != rows_b) {
      differ("plan", "regions", std::to_string(rows_a) + " and " + std::to_string(rows_b));
    } else if (wrong > 0) {
      const auto first = std::find(differs.begin(), differs.end(), true) - differs.begin();
      differ("plan", "regions",
             std::to_string(wrong) + " of " + std::to_string(rows) + " differ, the first is row " +
                 std::to_string(first) + ": " + region(a_, static_cast<std::size_t>(first)) +
                 " and " + region(b_, static_cast<std::size_t>(first)));
    }
  }

  static std::string region(const DumpReader& dump, std::size_t row) {
    return std::to_string(dump.column<std::uint64_t>("/plan/bytes")[row]) + " B from rank " +
           std::to_string(dump.column<std::int32_t>("/plan/source")[row]) + " to rank " +
           std::to_string(dump.column<std::int32_t>("/plan/destination")[row]) + " in stage " +
           std::to_string(dump.column<std::uint32_t>("/plan/stage")[row]);
  }

  void compare_traffic() {
    using Pairs = std::map<std::pair<Rank, Rank>, std::uint64_t>;
    const auto pairs_of = [](const DumpReader& dump) {
      const auto source = dump.column<std::int32_t>("/traffic/source");
      const auto destination = dump.column<std::int32_t>("/traffic/destination");
      const auto bytes = dump.column<std::uint64_t>("/traffic/bytes");
      Pairs out;
      for (std::size_t i = 0; i < std::min({source.size(), destination.size(), bytes.size()});
           ++i) {
        out[{source[i], destination[i]}] = bytes[i];
      }
      return out;
    };
    Pairs pairs_a = pairs_of(a_);
    Pairs pairs_b = pairs_of(b_);
    Pairs all = pairs_a;
    all.insert(pairs_b.begin(), pairs_b.end());
    std::uint64_t wrong = 0;
    std::uint64_t largest = 0;
    std::pair<Rank, Rank> where;
    for (const auto& entry : all) {
      const std::uint64_t x = pairs_a[entry.first];
      const std::uint64_t y = pairs_b[entry.first];
      const std::uint64_t difference = x > y ? x - y : y - x;
      wrong += difference > 0 ? 1 : 0;
      if (difference > largest) {
        largest = difference;
        where = entry.first;
      }
    }
    if (wrong > 0) {
      differ("traffic", "pairs of ranks",
             std::to_string(wrong) + " of " + std::to_string(all.size()) +
                 " carry other bytes, most from rank " + std::to_string(where.first) + " to rank " +
                 std::to_string(where.second) + ": " + std::to_string(pairs_a[where]) + " B and " +
                 std::to_string(pairs_b[where]) + " B");
    }
  }

  /// Where there are no shards: what each rank held, by its digest.
  void compare_digests(Role side, const Problem& problem_a, const Problem& problem_b) {
    using Key = std::pair<std::string, Rank>;
    const auto digests_of = [&](const DumpReader& dump, const Problem& problem) {
      std::map<Key, std::uint64_t> out;
      for (const DumpDigest& row : dump.digests()) {
        if (row.side == side && row.parameter < problem.parameters().size()) {
          out[{problem.parameters()[row.parameter].name, row.rank}] = row.digest;
        }
      }
      return out;
    };
    const auto digests_b = digests_of(b_, problem_b);
    for (const auto& [key, digest] : digests_of(a_, problem_a)) {
      const auto found = digests_b.find(key);
      if (found != digests_b.end() && found->second != digest) {
        differ("tensors", std::string(to_string(side)) + " tensor '" + key.first + "'",
               "rank " + std::to_string(key.second) +
                   " holds other elements, as their digests say (dump the shards to see which)");
      }
    }
  }

  DumpReader a_;
  DumpReader b_;
  DumpComparison out_;
};

}  // namespace

DumpComparison compare_dumps(const std::filesystem::path& a, const std::filesystem::path& b) {
  return FileComparison(a, b).run();
}

}  // namespace m2n
