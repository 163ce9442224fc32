// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// The bodies of control calls: what is refused, and what survives the wire.

#include <boost/json.hpp>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <ostream>

#include "core/engine/integrity.hpp"
#include "core/engine/requests.hpp"
#include "core/error.hpp"
#include "core/io/json_reader.hpp"
#include "tests/support/engine_job.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
namespace json = boost::json;

std::string id_of(std::size_t bytes) {
  std::string text((bytes + 2) / 3 * 4, 'A');
  const std::size_t padding = (3 - bytes % 3) % 3;
  std::fill(text.end() - static_cast<std::ptrdiff_t>(padding), text.end(), '=');
  return text;
}

InitRequest right_request() {
  const testing::EngineJob job(2, 2);
  InitRequest request;
  request.master_address = "127.0.0.1";
  request.master_port = 4711;
  request.unique_id_b64 = id_of(128);
  request.rank_offset = 2;
  request.world_size = 4;
  request.dst_mesh_dims = {1, 2};
  request.params = job.params();
  request.source_digest = sha256_hex(params_to_text(request.params));
  request.max_cta = 8;
  request.epoch = 3;
  request.world = "deployment 1";
  return request;
}

/// As it comes over HTTP.
json::object travelled(const InitRequest& request) {
  return parse_json(json::serialize(to_json(request)), "body").as_object();
}

struct Refused {
  std::string why;
  std::function<void(json::object&)> alter;
  std::string part;
};
std::ostream& operator<<(std::ostream& os, const Refused& c) { return os << c.why; }

json::object& param(json::object& body, std::size_t index) {
  return body.at("params").as_array()[index].as_object();
}

const std::vector<Refused> kRefused = {
    {"another schema", [](json::object& o) { o["schema_version"] = 2; },
     "has schema_version 2; this build speaks 1"},
    {"no address", [](json::object& o) { o["master_address"] = ""; },
     "master_address is empty; it must name the host"},
    {"an address that is no text", [](json::object& o) { o["master_address"] = 7; },
     "master_address"},
    {"port 0", [](json::object& o) { o["master_port"] = 0; }, "it must be 1 to 65535"},
    {"a port too large", [](json::object& o) { o["master_port"] = 65536; }, "65535"},
    {"a port that is no number", [](json::object& o) { o["master_port"] = true; }, "master_port"},
    {"no trainer", [](json::object& o) { o["rank_offset"] = 0; },
     "rank_offset 0 must leave at least one trainer rank and one worker in world_size 4"},
    {"no worker", [](json::object& o) { o["world_size"] = 2; },
     "rank_offset 2 must leave at least one trainer rank and one worker in world_size 2"},
    {"a mesh of one dim", [](json::object& o) { o["dst_mesh_dims"] = json::array{2}; },
     "dst_mesh_dims [2] must be two dims that cover the 2 workers"},
    {"a mesh of another size",
     [](json::object& o) {
       o["dst_mesh_dims"] = json::array{2, 2};
     },
     "dst_mesh_dims [2,2] must be two dims"},
    {"a mesh that overflows",
     [](json::object& o) {
       o["dst_mesh_dims"] = json::array{std::int64_t{1} << 62, std::int64_t{1} << 62};
     },
     "must be two dims"},
    {"a unique id that is not base64",
     [](json::object& o) { o["nccl_unique_id_b64"] = std::string(172, '*'); }, "is not base64"},
    {"a unique id that is too short", [](json::object& o) { o["nccl_unique_id_b64"] = id_of(127); },
     "holds 127 bytes; it must be base64 of 128 bytes"},
    {"an empty unique id", [](json::object& o) { o["nccl_unique_id_b64"] = ""; },
     "has 0 characters"},
    {"no CTA", [](json::object& o) { o["max_cta"] = 0; }, "max_cta is 0; it must be 1 or more"},
    {"a digest of other parameters", [](json::object& o) { o["source_digest"] = "beef"; },
     "has source_digest beef, but its params have"},
    {"a key that nobody knows", [](json::object& o) { o["color"] = "red"; }, "unknown key 'color'"},
    {"a key that is missing", [](json::object& o) { o.erase("world_size"); }, "world_size"},
    {"a parameter twice", [](json::object& o) { param(o, 1)["name"] = "rows to columns"; },
     "parameter 'rows to columns' is declared twice"},
    {"an unknown dtype", [](json::object& o) { param(o, 0)["dtype"] = "float99"; },
     "parameter 'rows to columns': "},
    {"a dtype of less than a byte", [](json::object& o) { param(o, 0)["dtype"] = "f4"; },
     "elements are smaller than a byte"},
    {"another shape than its layout",
     [](json::object& o) {
       param(o, 0)["shape"] = json::array{9, 15};
     },
     "is declared as f32 [9, 15], but its source layout is of f32 [9, 14]"},
    {"a negative extent",
     [](json::object& o) {
       param(o, 0)["shape"] = json::array{-1, 2};
     },
     "negative"},
    {"a source mesh that reaches the workers",
     [](json::object& o) {
       param(o, 0)["source"].at("layout").at("mesh").as_object()["start"] = 1;
     },
     "reaches rank 2, but the trainer ranks are 0 to 1"},
};

BOOST_AUTO_TEST_SUITE(engine)
BOOST_AUTO_TEST_SUITE(requests)

BOOST_DATA_TEST_CASE(an_init_that_cannot_be_right_is_refused, bdata::make(kRefused), c) {
  json::object body = travelled(right_request());
  BOOST_CHECK_NO_THROW(init_request_from_json(body));
  c.alter(body);
  BOOST_CHECK_EXCEPTION(init_request_from_json(body), Error, [&](const Error& error) {
    BOOST_TEST_MESSAGE(error.what());
    return std::string(error.what()).find(c.part) != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(an_init_survives_the_wire) {
  const InitRequest sent = right_request();
  const InitRequest read = init_request_from_json(travelled(sent));
  BOOST_TEST(read.unique_id_b64 == sent.unique_id_b64);
  BOOST_TEST(read.epoch == 3U);
  BOOST_TEST(read.world == "deployment 1");
  BOOST_TEST(read.max_cta.value() == 8);
  BOOST_TEST_REQUIRE(read.params.size() == sent.params.size());
  for (std::size_t i = 0; i < read.params.size(); ++i) {
    BOOST_TEST((*read.params[i].side.layout == *sent.params[i].side.layout));
  }
  BOOST_TEST(first_difference(params_to_text(sent.params), params_to_text(read.params)) == "");
}

BOOST_AUTO_TEST_CASE(flat_buffers_and_named_slots_survive_the_wire) {
  const auto flat =
      std::make_shared<const Layout>(Layout::flat({5, 3}, DType::bf16, 4, 24, {0, 1}));
  const std::vector<ParamSpec> sent = {{"w", DType::bf16, {5, 3}, {flat, {"flat:unit"}}}};
  const std::vector<ParamSpec> read = params_from_text(params_to_text(sent));
  BOOST_TEST((*read[0].side.layout == *flat));
  BOOST_TEST(read[0].side.buffers[0] == "flat:unit");
}

BOOST_AUTO_TEST_CASE(how_a_weight_is_quantised_survives_the_wire_and_differs) {
  const auto layout = std::make_shared<const Layout>(
      Layout::sharded({4, 6}, DType::bf16, Mesh({2}, 0), {Placement::shard(0)}));
  std::vector<ParamSpec> params = {{"w", DType::bf16, {4, 6}, {layout, {"w"}}, {}}};
  const std::string plain = params_to_text(params);
  params[0].quantise = Quantise{{2, 3}, "the \"scales\""};
  const std::string text = params_to_text(params);
  BOOST_TEST(text != plain);
  const std::vector<ParamSpec> read = params_from_text(text);
  BOOST_REQUIRE(read[0].quantise.has_value());
  BOOST_TEST((read[0].quantise->blocks == Dims{2, 3}));
  BOOST_TEST(read[0].quantise->scales == "the \"scales\"");
  BOOST_TEST(!params_from_text(plain)[0].quantise.has_value());
}

BOOST_AUTO_TEST_CASE(a_line_is_what_the_body_holds_whatever_the_name) {
  InitRequest request = right_request();
  for (const std::string name :
       {"with \"quotes\" and \\", "with\nlines and\ttabs", "\x7f", "größe"}) {
    request.params.push_back(request.params.front());
    request.params.back().name = name;
  }
  const json::object body = to_json(request);
  std::string expected;
  for (const json::value& line : body.at("params").as_array()) {
    expected += json::serialize(line) + '\n';
  }
  const std::string text = params_to_text(request.params);
  BOOST_TEST(text == expected);
  BOOST_TEST(params_to_text(params_from_text(text)) == text);
}

/// What is the same behind their names is read once; the buffers are each parameter's own.
BOOST_AUTO_TEST_CASE(parameters_that_differ_in_names_alone_keep_their_buffers) {
  const auto plain = std::make_shared<const Layout>(
      Layout::sharded({4, 6}, DType::f32, Mesh({2}, 0), {Placement::shard(0)}));
  InitRequest request = right_request();
  request.params.clear();
  for (const std::string name : {"a", "b", "c \"quoted\"", "größe"}) {
    request.params.push_back({name, DType::f32, {4, 6}, {plain, {name}}});
    request.params.push_back({name + " in one", DType::f32, {4, 6}, {plain, {"one"}}});
  }
  request.source_digest = sha256_hex(params_to_text(request.params));
  const std::vector<ParamSpec> lines = params_from_text(params_to_text(request.params));
  const InitRequest body = init_request_from_json(travelled(request));
  for (const std::vector<ParamSpec>& read : {lines, body.params}) {
    BOOST_TEST_REQUIRE(read.size() == request.params.size());
    for (std::size_t i = 0; i < read.size(); ++i) {
      BOOST_TEST(read[i].name == request.params[i].name);
      BOOST_TEST(read[i].side.buffers == request.params[i].side.buffers,
                 boost::test_tools::per_element());
      BOOST_TEST(read[i].side.layout.get() == read[0].side.layout.get());
    }
  }
}

/// Parameters of one shape, and destinations of two layouts by turns.
struct Resolved {
  Resolved() {
    for (const Rank first : {2, 4}) {
      layouts.push_back(std::make_shared<const Layout>(
          Layout::sharded({4, 6}, DType::f32, Mesh({2}, first), {Placement::shard(1)})));
    }
    for (std::size_t i = 0; i < 6; ++i) {
      const std::string name = "w" + std::to_string(i);
      params.push_back({name, DType::f32, {4, 6}, {layouts[0], {name}}});
      // Equal layouts need not be one object.
      const auto again = std::make_shared<const Layout>(*layouts[i % 2]);
      resolutions.push_back({i == 3 ? Mode::fallback : Mode::direct,
                             {again, {i == 4 ? "fused" : name}},
                             i == 5,
                             {},
                             i == 3 ? "unit" : ""});
    }
  }

  std::vector<std::shared_ptr<const Layout>> layouts;
  std::vector<ParamSpec> params;
  std::vector<Resolution> resolutions;
};

BOOST_AUTO_TEST_CASE(resolutions_survive_the_wire_and_spell_each_layout_once) {
  const Resolved sent;
  const std::string text = resolutions_to_text(sent.params, sent.resolutions);
  const std::string spelled = sent.layouts[1]->canonical_json();
  BOOST_TEST_REQUIRE(text.find(spelled) != text.npos);
  BOOST_TEST(text.find(spelled, text.find(spelled) + 1) == text.npos);
  const std::vector<Resolution> read = resolutions_from_text(text, sent.params);
  BOOST_TEST_REQUIRE(read.size() == sent.resolutions.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    const Resolution& expected = sent.resolutions[i];
    BOOST_TEST((*read[i].side.layout == *expected.side.layout));
    BOOST_TEST(read[i].side.layout.get() == read[i % 2].side.layout.get());
    BOOST_TEST(read[i].side.buffers == expected.side.buffers, boost::test_tools::per_element());
    BOOST_TEST((read[i].mode == expected.mode));
    BOOST_TEST(read[i].cast == expected.cast);
    BOOST_TEST(read[i].together == expected.together);
  }
}

BOOST_AUTO_TEST_CASE(resolutions_that_differ_in_a_layout_are_told_with_the_layouts) {
  const Resolved sent;
  const std::string text = resolutions_to_text(sent.params, sent.resolutions);
  Resolved other;
  other.resolutions[4].side.layout = other.layouts[1];
  const auto destination = [](const Layout& layout) {
    return R"({"layout":)" + layout.canonical_json() + R"(,"buffers":["fused"]})";
  };
  BOOST_TEST(first_difference(text, resolutions_to_text(other.params, other.resolutions)) ==
             "parameter 'w4' has destination " + destination(*sent.layouts[1]) + " instead of " +
                 destination(*sent.layouts[0]));
  std::string wrong = text;
  wrong.replace(wrong.rfind("\"layout\":1"), 10, "\"layout\":7");
  BOOST_CHECK_EXCEPTION(resolutions_from_text(wrong, sent.params), Error, [](const Error& error) {
    return std::string(error.what()) == "layout of 'w5' is layout 7 of the 2 that came before it";
  });
}

BOOST_AUTO_TEST_CASE(a_slice_survives_the_wire_as_names_and_as_a_range) {
  RoundRequest names;
  names.names = {"a", "größe", "with \"quotes\""};
  const RoundRequest by_name = round_request_from_json(to_json(names), "update_weights", true);
  BOOST_TEST(by_name.names == names.names, boost::test_tools::per_element());
  BOOST_TEST(!by_name.range.has_value());
  RoundRequest range;
  range.range = {3, 18867};
  range.source_digest = "beef";
  const RoundRequest by_number = round_request_from_json(to_json(range), "update_weights", true);
  BOOST_TEST(by_number.names.empty());
  BOOST_TEST(by_number.range.value().begin == 3U);
  BOOST_TEST(by_number.range.value().end == 18867U);
  BOOST_TEST(by_number.source_digest.value() == "beef");
}

BOOST_AUTO_TEST_CASE(a_version_may_be_an_unsigned_number) {
  const json::object body{{"version", std::uint64_t{7}}, {"epoch", std::uint64_t{2}}};
  const RoundRequest read = round_request_from_json(body, "start_weight_update", false);
  BOOST_TEST(read.version.value() == 7U);
  BOOST_TEST(read.epoch.value() == 2U);
  const json::object large{{"version", UINT64_MAX}};
  BOOST_CHECK_EXCEPTION(
      round_request_from_json(large, "start_weight_update", false), Error, [](const Error& error) {
        BOOST_TEST_MESSAGE(error.what());
        return std::string(error.what()).find("version is above 2^63-1") != std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(the_first_difference_names_the_parameter_and_how_it_differs) {
  const std::vector<ParamSpec> params = right_request().params;
  const std::string text = params_to_text(params);
  std::vector<ParamSpec> other = params;
  other[1].dtype = DType::f16;
  BOOST_TEST(first_difference(text, params_to_text(other)) ==
             "parameter 'rows to all' has dtype \"f16\" instead of \"bf16\"");
  other = params;
  std::swap(other[0], other[1]);
  BOOST_TEST(first_difference(text, params_to_text(other)) ==
             "parameter 'rows to all' stands where 'rows to columns' does");
  other = params;
  other.pop_back();
  BOOST_TEST(first_difference(text, params_to_text(other)) ==
             "4 parameters instead of 5, the first missing one is 'scalar'");
}

BOOST_AUTO_TEST_SUITE_END()
BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace m2n
