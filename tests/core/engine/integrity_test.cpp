// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The digests of a round, over buffers that are filled by an oracle: totals that agree, and what
/// is said when they do not.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/engine/integrity.hpp"
#include "core/error.hpp"
#include "tests/support/placed_problem.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;

constexpr std::uint32_t kSeeds = 60;

/// The memory of every rank of a random problem, as after a round that went well.
class Landed {
 public:
  explicit Landed(std::uint64_t seed) : random_(seed), placed_(draw()) {
    for (Rank rank = 0; rank < problem().world_size(); ++rank) {
      for (const Role role : {Role::source, Role::destination}) {
        fill(rank, role);
      }
      integrities_.emplace_back(problem(), rank);
    }
  }

  const Problem& problem() const { return placed_.problem; }
  const Integrity& integrity(Rank rank) const {
    return integrities_[static_cast<std::size_t>(rank)];
  }
  std::vector<std::byte>& bytes(Rank rank, Role role, std::uint32_t buffer) {
    return memory_[{rank, role}][buffer];
  }

  std::vector<std::string> totals() { return texts(true); }
  std::vector<std::string> digests() { return texts(false); }

  /// Flips a bit of one element that some destination rank holds. @return the parameter and the
  /// rank; nothing where nothing is held.
  std::optional<std::pair<std::uint32_t, Rank>> flip() {
    std::vector<std::tuple<Rank, std::uint32_t, testing::Place>> all;
    for (const auto& [where, places] : placed_.truth.destination) {
      const auto& names = problem().buffers(Role::destination).names;
      const auto at = std::find(names.begin(), names.end(), where.second);
      for (const testing::Place& place : places) {
        all.emplace_back(where.first, static_cast<std::uint32_t>(at - names.begin()), place);
      }
    }
    if (all.empty()) {
      return {};
    }
    const auto& [rank, buffer, place] = all[random_() % all.size()];
    const std::uint64_t item =
        bytes_of(problem().parameters()[place.parameter].destination_dtype());
    bytes(rank, Role::destination, buffer)[place.offset_bytes + random_() % item] ^= std::byte{4};
    return {{place.parameter, rank}};
  }

 private:
  testing::PlacedProblem draw() {
    testing::PlacedLimits limits;
    limits.casts = false;
    return testing::placed_problem(random_, limits);
  }

  void fill(Rank rank, Role role) {
    const Problem& p = problem();
    auto& memory = memory_[{rank, role}];
    const std::vector<std::uint64_t> needed = p.buffer_bytes(role, rank);
    for (const std::uint64_t bytes : needed) {
      memory.emplace_back(bytes, std::byte{0x5a});
    }
    const auto& truth = role == Role::source ? placed_.truth.source : placed_.truth.destination;
    for (std::uint32_t buffer = 0; buffer < needed.size(); ++buffer) {
      const auto places = truth.find({rank, p.buffers(role).names[buffer]});
      if (places == truth.end()) {
        continue;
      }
      for (const testing::Place& place : places->second) {
        const DType dtype = p.parameters()[place.parameter].source_dtype();
        const std::uint64_t bits = testing::test_bits(dtype, place.parameter, place.flat);
        std::memcpy(memory[buffer].data() + place.offset_bytes, &bits, bytes_of(dtype));
      }
    }
  }

  std::vector<LocalBuffer> bound(Rank rank, Role role) {
    std::vector<LocalBuffer> out;
    for (std::vector<std::byte>& buffer : memory_[{rank, role}]) {
      out.push_back({buffer.data(), buffer.size()});
    }
    return out;
  }

  std::vector<std::string> texts(bool totals) {
    std::vector<std::size_t> all(problem().parameters().size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    std::vector<std::string> out;
    for (Rank rank = 0; rank < problem().world_size(); ++rank) {
      Integrity::Measurement measurement;
      integrity(rank).measure_sent(all, bound(rank, Role::source), measurement);
      integrity(rank).measure_held(all, bound(rank, Role::destination), measurement);
      out.push_back(totals ? integrity(rank).totals(measurement) : measurement.text());
    }
    return out;
  }

  std::mt19937_64 random_;
  testing::PlacedProblem placed_;
  std::map<std::pair<Rank, Role>, std::vector<std::vector<std::byte>>> memory_;
  std::vector<Integrity> integrities_;
};

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(integrity)

BOOST_DATA_TEST_CASE(what_has_landed_right_has_equal_totals, bdata::xrange(kSeeds), seed) {
  Landed landed(seed);
  BOOST_TEST(landed.integrity(0).totals_agree(landed.totals()));
  BOOST_TEST(landed.integrity(0).compare(landed.digests()) == "");
}

BOOST_DATA_TEST_CASE(one_wrong_bit_shows_in_the_totals_and_is_named, bdata::xrange(kSeeds), seed) {
  Landed landed(seed);
  const auto wrong = landed.flip();
  if (!wrong) {
    return;
  }
  const std::string said = landed.integrity(0).compare(landed.digests());
  BOOST_TEST(!landed.integrity(0).totals_agree(landed.totals()));
  BOOST_TEST(said.find("rank " + std::to_string(wrong->second) + " holds") == 0U, said);
  BOOST_TEST(said.find("'" + landed.problem().parameters()[wrong->first].name + "'") != said.npos,
             said);
}

BOOST_AUTO_TEST_CASE(a_broken_total_is_refused) {
  Landed landed(1);
  for (const std::string& broken : {std::string(), std::string(7, '\0'), std::string(8, '\1')}) {
    std::vector<std::string> texts = landed.totals();
    texts.back() = broken;
    BOOST_CHECK_THROW(landed.integrity(0).totals_agree(texts), Error);
  }
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
