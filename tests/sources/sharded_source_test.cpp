// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "sources/sharded_source.hpp"

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>

#include "core/api/builtin.hpp"
#include "tests/sources/harness.hpp"

namespace bdata = boost::unit_test::data;
using namespace m2n;
using namespace m2n::testing;

namespace {

/// One value everywhere, under any name.
class ConstantValues final : public TensorValues {
 public:
  explicit ConstantValues(Catalogue catalogue) : catalogue_(std::move(catalogue)) {}
  std::string_view name() const noexcept override { return "constant"; }
  const Catalogue& catalogue() const override { return catalogue_; }
  void read(std::string_view, const Box& box, std::byte* data,
            const Strides& strides) const override {
    for_each_index(box.extents(), [&](const Dims& at, Index) {
      Index offset = 0;
      for (std::size_t d = 0; d < at.size(); ++d) {
        offset += at[d] * strides[d];
      }
      const float value = 1.5F;
      std::memcpy(data + offset * 4, &value, 4);
    });
  }

 private:
  Catalogue catalogue_;
};

ParamSpec spec(const std::string& name, const Shape& shape, Layout layout,
               std::vector<std::string> buffers) {
  return {name,
          layout.dtype(),
          shape,
          {std::make_shared<const Layout>(std::move(layout)), std::move(buffers)}};
}

/// One rank, one view.
ParamSpec viewed(const std::string& name, const Shape& shape, const std::string& buffer,
                 std::uint64_t offset_bytes, const Strides& strides) {
  return spec(name, shape,
              Layout::explicit_pieces(shape, DType::f32, {0},
                                      {{0, {Box::whole(shape), {0, offset_bytes, strides}}}}),
              {buffer});
}

std::unique_ptr<WeightSource> declared(std::vector<ParamSpec> params,
                                       std::shared_ptr<const TensorValues> values = nullptr,
                                       Rank rank = 0) {
  if (!values) {
    Catalogue catalogue;
    for (const auto& param : params) {
      catalogue.push_back({param.name, param.dtype, param.shape});
    }
    values = std::make_shared<TellingValues>(catalogue);
  }
  return builtin_registries().sources.create(
      "declared",
      {.options = {}, .rank = rank, .ranks = 2, .values = values, .declared = std::move(params)});
}

/// "name:flat" of 4-byte elements of a buffer.
std::vector<std::uint32_t> words(const LocalBuffer& buffer) {
  std::vector<std::uint32_t> out(buffer.bytes / 4);
  std::memcpy(out.data(), buffer.data, out.size() * 4);
  return out;
}

auto says(Errc code, const std::string& part) {
  return [=](const Error& error) {
    BOOST_TEST_INFO(error.what());
    BOOST_TEST((error.code() == code));
    return std::string(error.what()).find(part) != std::string::npos;
  };
}

}  // namespace

BOOST_AUTO_TEST_SUITE(sources)
BOOST_AUTO_TEST_SUITE(sharded_source)

BOOST_AUTO_TEST_CASE(versions_only_grow_and_may_repeat) {
  const auto source = declared({viewed("w", {4}, "w", 0, {1})});
  const auto first = source->borrow(3);
  const auto again = source->borrow(3);
  const auto later = source->borrow(7);
  BOOST_TEST(first[0].slots[0].data == again[0].slots[0].data);
  BOOST_TEST(first[0].slots[0].data == later[0].slots[0].data);
  BOOST_CHECK_EXCEPTION(source->borrow(6), Error,
                        says(Errc::bad_argument, "was asked for version 6 after version 7"));
  BOOST_TEST(source->borrow(8).size() == 1U);
}

BOOST_AUTO_TEST_CASE(a_fused_and_transposed_view_lies_where_it_says) {
  // b [2, 2] is stored transposed behind one strange word; a [2] lies on every other word.
  const auto source =
      declared({viewed("a", {2}, "fused", 0, {2}), viewed("b", {2, 2}, "fused", 16, {1, 2})});
  const auto loans = source->borrow(1);
  BOOST_TEST(loans[0].slots[0].data == loans[1].slots[0].data);
  const auto value = [](std::uint64_t number, Index index) {
    return static_cast<std::uint32_t>(TellingValues::bits(number, index, 4));
  };
  const std::vector<std::uint32_t> expected = {value(0, 0), 0x2a2a2a2a,  value(0, 1), 0x2a2a2a2a,
                                               value(1, 0), value(1, 2), value(1, 1), value(1, 3)};
  BOOST_TEST(words(loans[0].slots[0]) == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(views_may_interleave_but_not_overlap) {
  // Spans overlap, elements do not.
  const auto source = declared({viewed("a", {3}, "x", 0, {2}), viewed("b", {3}, "x", 4, {2})});
  BOOST_TEST(source->borrow(1).size() == 2U);
  const auto overlapping = declared({viewed("a", {3}, "x", 0, {2}), viewed("b", {2}, "x", 8, {1})});
  BOOST_CHECK_EXCEPTION(overlapping->borrow(1), Error,
                        says(Errc::bad_argument, "shares bytes of buffer 'x'"));
  const auto folded = declared({viewed("a", {3, 2}, "x", 0, {1, 1})});
  BOOST_CHECK_EXCEPTION(folded->borrow(1), Error,
                        says(Errc::bad_argument, "parameter 'a' on rank 0"));
}

BOOST_AUTO_TEST_CASE(an_alias_of_equal_values_is_lent) {
  std::vector<ParamSpec> params = {viewed("embed", {4}, "x", 0, {1}),
                                   viewed("head", {4}, "x", 0, {1})};
  const auto values = std::make_shared<ConstantValues>(
      Catalogue{{"embed", DType::f32, {4}}, {"head", DType::f32, {4}}});
  const auto source = declared(params, values);
  const auto loans = source->borrow(1);
  BOOST_TEST(loans[0].slots[0].data == loans[1].slots[0].data);
  BOOST_TEST(loans[0].slots[0].bytes == 16U);
}

BOOST_AUTO_TEST_CASE(a_rank_that_holds_nothing_lends_empty_buffers) {
  const auto source = declared({viewed("w", {4}, "w", 0, {1})}, nullptr, 1);
  const auto loans = source->borrow(1);
  BOOST_TEST(loans[0].slots.size() == 1U);
  BOOST_TEST(loans[0].slots[0].bytes == 0U);
  BOOST_TEST(loans[0].slots[0].data == nullptr);
}

BOOST_AUTO_TEST_CASE(several_slots_are_lent_in_order) {
  Layout layout = Layout::explicit_pieces(
      {4}, DType::f32, {0}, {{0, {{{0}, {1}}, {1, 4, {1}}}}, {0, {{{1}, {4}}, {0, 0, {1}}}}});
  const auto source = declared({spec("w", {4}, std::move(layout), {"x", "y"})});
  const auto loans = source->borrow(1);
  BOOST_TEST(loans[0].slots.size() == 2U);
  BOOST_TEST(loans[0].slots[0].bytes == 12U);
  BOOST_TEST(loans[0].slots[1].bytes == 8U);
  BOOST_TEST(words(loans[0].slots[1])[1] == TellingValues::bits(0, 0, 4));
}

BOOST_AUTO_TEST_CASE(equal_layouts_share_one_object) {
  const auto source = declared({viewed("a", {4}, "a", 0, {1}), viewed("b", {4}, "b", 0, {1}),
                                viewed("c", {4}, "c", 4, {1})});
  const auto& params = source->params();
  BOOST_TEST((params[0].side.layout == params[1].side.layout));
  BOOST_TEST((params[0].side.layout != params[2].side.layout));
}

BOOST_AUTO_TEST_CASE(a_local_shape_declared_as_global_is_refused_before_a_byte_moves) {
  const auto values = std::make_shared<TellingValues>(Catalogue{{"w", DType::f32, {512, 2}}});
  BOOST_CHECK_EXCEPTION(
      declared({viewed("w", {256, 2}, "w", 0, {2, 1})}, values), Error,
      says(Errc::bad_argument,
           "parameter 'w' is declared as f32 [256, 2], but its values are f32 [512, 2]"));
}

BOOST_AUTO_TEST_CASE(a_name_twice_or_without_values_is_refused) {
  const auto values = std::make_shared<TellingValues>(Catalogue{{"w", DType::f32, {4}}});
  BOOST_CHECK_EXCEPTION(
      declared({viewed("w", {4}, "a", 0, {1}), viewed("w", {4}, "b", 0, {1})}, values), Error,
      says(Errc::bad_argument, "parameter 'w' is offered twice"));
  BOOST_CHECK_EXCEPTION(declared({viewed("v", {4}, "v", 0, {1})}, values), Error,
                        says(Errc::bad_argument, "parameter 'v' has no values"));
}

BOOST_AUTO_TEST_CASE(a_layout_of_another_tensor_is_refused) {
  auto param = viewed("w", {4}, "w", 0, {1});
  param.shape = {2, 2};
  BOOST_CHECK_EXCEPTION(declared({param}), Error,
                        says(Errc::bad_argument, "but its layout is of f32 [4]"));
  param = viewed("w", {4}, "w", 0, {1});
  param.side.buffers.clear();
  BOOST_CHECK_EXCEPTION(declared({param}), Error, says(Errc::bad_argument, "names 0 buffers"));
  param.side.layout = nullptr;
  BOOST_CHECK_EXCEPTION(declared({param}), Error, says(Errc::bad_argument, "has no layout"));
}

BOOST_AUTO_TEST_CASE(declared_has_no_options) {
  BOOST_TEST(refuses("declared", {{"path", "x"}}, 1, {}, Errc::usage,
                     "source 'declared': there is no option 'path'; it has none"));
}

BOOST_AUTO_TEST_CASE(nothing_is_allocated_before_the_first_loan) {
  // 2^40 elements: fine to plan with, not to hold.
  const auto values =
      std::make_shared<TellingValues>(Catalogue{{"w", DType::f32, {Index{1} << 40}}});
  const auto source = builtin_registries().sources.create(
      "fsdp", {.options = {}, .rank = 0, .ranks = 2, .values = values, .declared = {}});
  BOOST_TEST(source->params().size() == 1U);
}

struct GlobCase {
  const char* pattern;
  const char* name;
  bool matches;
};
std::ostream& operator<<(std::ostream& os, const GlobCase& c) {
  return os << c.pattern << " and " << c.name;
}

const std::vector<GlobCase> kGlobs = {
    {"", "", true},
    {"", "a", false},
    {"*", "", true},
    {"*", "a.b", true},
    {"a*c", "abbc", true},
    {"a*c", "ac", true},
    {"a*c", "acb", false},
    {"a?c", "abc", true},
    {"a?c", "ac", false},
    {"*a*b", "xaab", true},
    {"*a*b", "xaaba", false},
    {"*.bias", "q.bias", true},
    {"*.bias", "bias", false},
    {"a**", "a", true},
    {"*ab", "aab", true},
};

BOOST_DATA_TEST_CASE(patterns_match_whole_names, bdata::make(kGlobs), c) {
  BOOST_TEST(m2n::sources::glob_matches(c.pattern, c.name) == c.matches);
}

BOOST_AUTO_TEST_CASE(lists_are_split_outside_parentheses) {
  BOOST_TEST(m2n::sources::split(" Shard(0), StridedShard(0,2) ", ',') ==
                 (std::vector<std::string>{"Shard(0)", "StridedShard(0,2)"}),
             boost::test_tools::per_element());
  BOOST_TEST(m2n::sources::split("  ", ',').empty());
  BOOST_TEST(m2n::sources::split("a,", ',').size() == 2U);
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()
