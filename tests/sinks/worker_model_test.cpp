// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <ostream>
#include <random>

#include "tests/sinks/fixtures.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::thrown_by;

const Catalogue kTensors = {{"a", DType::f32, {4, 6}},
                            {"b", DType::f32, {2, 6}},
                            {"bias", DType::f32, {4}},
                            {"scale", DType::f32, {}},
                            {"empty", DType::f32, {0, 6}}};

Section section(const std::string& tensor, const Box& box, Index offset, const Strides& strides) {
  return {tensor, box, offset, strides};
}

struct CoverCase {
  const char* why;
  Shape shape;
  std::vector<Section> sections;
  std::vector<Box> padding;
  std::vector<const char*> mentions;  ///< None: the parameter is covered.
};
std::ostream& operator<<(std::ostream& os, const CoverCase& c) { return os << c.why; }

const Box kA = {{0, 0}, {4, 6}};
const Box kB = {{0, 0}, {2, 6}};

const std::vector<CoverCase> kCoverCases = {
    {"one tensor, whole", {4, 6}, {section("a", kA, 0, {6, 1})}, {}, {}},
    {"two tensors, one after another",
     {6, 6},
     {section("a", kA, 0, {6, 1}), section("b", kB, 24, {6, 1})},
     {},
     {}},
    {"a transposed tensor", {6, 4}, {section("a", kA, 0, {1, 4})}, {}, {}},
    {"rows in reverse", {4, 6}, {section("a", kA, 18, {-6, 1})}, {}, {}},
    {"rows that alternate",
     {4, 6},
     {section("b", kB, 0, {12, 1}), section("a", {{1, 0}, {3, 6}}, 6, {12, 1})},
     {},
     {}},
    {"columns that alternate",
     {4, 6},
     {section("a", {{0, 0}, {4, 3}}, 0, {6, 2}), section("a", {{0, 3}, {4, 6}}, 1, {6, 2})},
     {},
     {}},
    {"combs of different steps that never meet",
     {6},
     {section("bias", {{0}, {2}}, 0, {3}), section("bias", {{0}, {2}}, 1, {4}),
      section("bias", {{0}, {2}}, 2, {2})},
     {},
     {}},
    {"another shape of the same elements", {2, 2, 6}, {section("a", kA, 0, {6, 1})}, {}, {}},
    {"a run that starts in the middle of a row",
     {3, 4},
     {section("bias", {{0}, {3}}, 0, {1}), section("bias", {{0}, {4}}, 3, {1}),
      section("bias", {{0}, {1}}, 7, {1}), section("bias", {{0}, {4}}, 8, {1})},
     {},
     {}},
    {"padding around",
     {5, 7},
     {section("a", kA, 0, {7, 1})},
     {{{0, 6}, {4, 7}}, {{4, 0}, {5, 7}}},
     {}},
    {"a scalar", {}, {section("scale", {{}, {}}, 0, {})}, {}, {}},
    {"no element at all", {0, 6}, {section("empty", {{0, 0}, {0, 6}}, 0, {6, 1})}, {}, {}},
    {"padding alone", {2, 3}, {}, {{{0, 0}, {2, 3}}}, {}},

    {"nobody feeds a scalar", {}, {}, {}, {"'p'", "1 elements that nobody feeds"}},
    {"one row is short",
     {4, 6},
     {section("a", {{0, 0}, {3, 6}}, 0, {6, 1})},
     {},
     {"'p'", "6 elements that nobody feeds", "[3:4, 0:6]"}},
    {"alternating rows, one of them missing",
     {4, 6},
     {section("b", kB, 0, {12, 1})},
     {},
     {"'p'", "12 elements that nobody feeds"}},
    {"two sections share a row",
     {5, 6},
     {section("a", kA, 0, {6, 1}), section("b", kB, 18, {6, 1})},
     {},
     {"'p'", "'a'", "'b'", "overlaps"}},
    {"padding over a section",
     {4, 6},
     {section("a", kA, 0, {6, 1})},
     {{{3, 0}, {4, 1}}},
     {"padding [3:4, 0:1]", "overlaps", "'a'"}},
    {"combs that meet",
     {12},
     {section("bias", {{0}, {4}}, 0, {3}), section("bias", {{0}, {3}}, 1, {4})},
     {},
     {"overlaps"}},
    {"past the end", {4, 6}, {section("a", kA, 1, {6, 1})}, {}, {"'p'", "reaches", "[4, 6]"}},
    {"before the start", {4, 6}, {section("a", kA, 17, {-6, 1})}, {}, {"'p'", "reaches"}},
    {"two elements at one place", {6}, {section("a", kA, 0, {0, 1})}, {}, {"strides must not"}},
    {"strides that run into one another", {9}, {section("a", kA, 0, {1, 1})}, {}, {"overlaps"}},
    {"a box outside its tensor",
     {5, 6},
     {section("a", {{0, 0}, {5, 6}}, 0, {6, 1})},
     {},
     {"'p'", "[0:5, 0:6]", "'a'", "[4, 6]"}},
    {"a box of another rank", {24}, {section("a", {{0}, {24}}, 0, {1})}, {}, {"'a'", "[4, 6]"}},
    {"a tensor that is not there",
     {4, 6},
     {section("c", kA, 0, {6, 1})},
     {},
     {"'p'", "'c'", "lacks"}},
    {"padding outside",
     {4, 6},
     {section("a", kA, 0, {6, 1})},
     {{{4, 0}, {5, 6}}},
     {"padding [4:5, 0:6]", "[4, 6]"}},
    {"a stride beyond 64 bits",
     {4, 6},
     {section("a", kA, 0, {Index{1} << 62, 1})},
     {},
     {"offset inside a parameter"}},
};

WorkerModel model_of(const CoverCase& c) {
  WorkerParameter parameter;
  parameter.name = "p";
  parameter.shape = c.shape;
  parameter.sections = c.sections;
  parameter.padding = c.padding;
  return {{parameter}};
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sinks)
BOOST_AUTO_TEST_SUITE(worker_model)

BOOST_DATA_TEST_CASE(sections_and_padding_cover_each_element_once, bdata::make(kCoverCases), c) {
  const auto result = thrown_by([&] { check_worker_model(model_of(c), kTensors); });
  BOOST_TEST(result.any == !c.mentions.empty(), result.text);
  if (result.any) {
    BOOST_TEST((result.code == Errc::bad_argument));
  }
  for (const char* part : c.mentions) {
    BOOST_TEST(result.mentions(part), "'" << part << "' is not in: " << result.text);
  }
}

BOOST_AUTO_TEST_CASE(verdicts_on_random_sections_are_those_of_a_visit_to_every_element) {
  const char* given = std::getenv("M2N_TEST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10))
                                         : std::random_device{}();
  BOOST_TEST_MESSAGE("M2N_TEST_SEED=" << seed);
  std::mt19937 random(seed);
  const auto pick = [&](Index lo, Index hi) {
    return std::uniform_int_distribution<Index>(lo, hi)(random);
  };
  int covered = 0;
  constexpr int kRounds = 4000;
  for (int round = 0; round < kRounds; ++round) {
    // A local parameter of interleaved and permuted parts of one tensor, sometimes damaged.
    const Index ways = pick(1, 3);
    const Shape tensor = {pick(1, 4), ways * pick(1, 3), pick(1, 4)};
    const Catalogue catalogue = {{"t", DType::f32, tensor}};
    std::vector<std::size_t> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    WorkerParameter parameter;
    parameter.name = "p";
    Strides strides = Dims::filled(3, 0);
    Index stride = 1;
    for (std::size_t k = 3; k-- > 0;) {
      strides[order[k]] = stride;
      stride *= tensor[order[k]];
    }
    parameter.shape = {tensor[order[0]], tensor[order[1]], tensor[order[2]]};
    if (pick(0, 1) == 1) {  // the same elements with fewer dimensions
      parameter.shape = {parameter.shape[0] * parameter.shape[1], parameter.shape[2]};
    }
    const Index share = tensor[1] / ways;
    for (Index way = 0; way < ways; ++way) {  // part `way` goes to every ways-th place
      parameter.sections.push_back(
          {"t",
           {{0, way * share, 0}, {tensor[0], (way + 1) * share, tensor[2]}},
           way * strides[1],
           {strides[0], ways * strides[1], strides[2]}});
    }
    if (pick(0, 1) == 1) {
      Section& hit = parameter.sections[static_cast<std::size_t>(pick(0, ways - 1))];
      const auto d = static_cast<std::size_t>(pick(0, 2));
      switch (pick(0, 3)) {
        case 0:
          hit.offset += pick(-1, 1);
          break;
        case 1:
          hit.strides[d] += pick(-2, 2);
          break;
        case 2:
          hit.box.hi[d] = std::max(hit.box.lo[d], hit.box.hi[d] - pick(0, 1));
          break;
        default:
          parameter.padding.push_back(
              {Dims::filled(parameter.shape.size(), 0), Dims::filled(parameter.shape.size(), 1)});
      }
    }
    bool right = true;
    try {
      (void)testing::origins(parameter, catalogue);
    } catch (const std::exception&) {
      right = false;
    }
    const auto verdict = thrown_by([&] { check_worker_model({{parameter}}, catalogue); });
    BOOST_REQUIRE_MESSAGE(verdict.any != right, "seed " << seed << ", round " << round << ": "
                                                        << (right ? "right" : "wrong") << ", "
                                                        << verdict.text);
    covered += right ? 1 : 0;
  }
  BOOST_TEST(covered > kRounds / 4);
  BOOST_TEST(covered < kRounds - kRounds / 10);
}

BOOST_AUTO_TEST_CASE(a_parameter_name_stands_once) {
  WorkerModel model = model_of(kCoverCases.front());
  model.parameters.push_back(model.parameters.front());
  const auto result = thrown_by([&] { check_worker_model(model, kTensors); });
  BOOST_TEST(result.mentions("'p' stands twice"), result.text);
}

BOOST_AUTO_TEST_CASE(what_must_be_equal_has_a_live_parameter_of_its_shape) {
  WorkerModel model = model_of(kCoverCases.front());
  WorkerParameter tied = model.parameters.front();
  tied.name = "head";
  tied.same_as = "p";
  model.parameters.push_back(tied);
  BOOST_TEST(!thrown_by([&] { check_worker_model(model, kTensors); }).any);
  model.parameters.back().same_as = "q";
  BOOST_TEST(thrown_by([&] { check_worker_model(model, kTensors); }).mentions("'q'"));
  model.parameters.back().same_as = "p";
  model.parameters.back().dtype = DType::bf16;
  BOOST_TEST(thrown_by([&] { check_worker_model(model, kTensors); }).mentions("bf16"));
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
